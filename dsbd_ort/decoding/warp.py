"""From logits to distributions: temperature, top-k, top-p, renormalised per position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.logits import Logits
from dsbd_forward.rows import finite, largest_columns, log_normalised, row_sums
from dsbd_forward.spec import EngineSpec
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.distribution import (
    DenseDistributions,
    Floats,
    TokenDistributions,
    TopDistributions,
)
from dsbd_ort.decoding.errors import ConfigError

_NEAR = 1e-9  # sums of the same probabilities that are this near may round to either side
_FIRST_TOKENS = 128  # of a position that a search looks at before it knows the best


@dataclass(frozen=True)
class Warp:
    """The warping of a request: ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and ``typical_p`` 1 are off.

    They are applied in this order, each with its renormalisation, as in transformers: the most
    probable tokens, the fewest that reach a mass (Holtzman et al. 2020), those of at least a share
    of the most probable one's, and the fewest nearest to the entropy that reach a mass (Meister et
    al. 2023). With ``is_raw`` the ``log_probs`` are the raw ones, and top-k bounds the tokens read.
    Of a draft (``is_draft``) no raw ones are read, unless they are all that there is.
    """

    temperature: float
    top_k: int
    top_p: float
    is_raw: bool = False
    min_p: float = 0.0
    typical_p: float = 1.0
    is_draft: bool = False

    @classmethod
    def of(cls, config: DecodingConfig) -> Warp:
        """Return the warping of both models' logits that a request's rule requires."""
        if config.row.rule == "search":
            num_candidates = max(
                num_searched(config), config.most_draft_beams + len(config.eos_ids)
            )
            return cls(1.0, num_candidates, 1.0, is_raw=True)
        return cls(
            config.temperature or 1.0,
            config.top_k,
            config.top_p,
            min_p=config.min_p,
            typical_p=config.typical_p,
        )

    def narrowed(self) -> Warp:
        """Return one for a search that reads fewer tokens of a position, and others later."""
        return replace(self, top_k=min(self.top_k, _FIRST_TOKENS)) if self.is_raw else self

    def within(self, num_top_logits: int) -> Warp:
        """Return one that a draft with a top-k head of K (0: all) logits can serve."""
        is_served = self.is_raw or not num_top_logits or 1 <= self.top_k <= num_top_logits
        return replace(self, top_k=self.top_k if is_served else num_top_logits, is_draft=True)

    def distributions(self, logits: Logits) -> TokenDistributions:
        """Return the next-token distribution of every row; ModelError: no finite largest logit."""
        rows = None if self.top_k else logits.whole
        if rows is None:
            tokens, scores = logits.most_probable(self.top_k)
            if self.is_raw:
                return TopDistributions(tokens, scores - logits.log_normalizers, None)
            raw = None if self.is_draft else scores - logits.log_normalizers
            return TopDistributions(tokens, self.warped(scores - scores[:, :1]), raw)
        largest = finite(rows.max(axis=1)) if len(rows) else rows[:, 0]
        return DenseDistributions(rows, largest, None if self.is_raw else self.warped)

    def warped(self, centred: Floats) -> Floats:
        """Return warped log-probabilities of logits, both (num_rows, n) float64."""
        is_scaled = self.temperature != 1.0
        log_probs = log_normalised(centred / self.temperature if is_scaled else centred)
        if self.top_p < 1.0:
            log_probs = log_normalised(_cut_top_p(log_probs, self.top_p))
        if self.min_p > 0.0:
            least = log_probs.max(axis=1, keepdims=True) + np.log(self.min_p)
            log_probs = log_normalised(np.where(log_probs < least, -np.inf, log_probs))
        if self.typical_p < 1.0:
            log_probs = log_normalised(_cut_typical(log_probs, self.typical_p))
        return log_probs


def _cut_top_p(log_probs: Floats, top_p: float, numbers: Sequence[int] = (256, 4096)) -> Floats:
    """Set all but the smallest set of most probable tokens that reaches ``top_p`` to -inf.

    numbers: of tokens, tried one after the other before all are sorted.
    """
    if not numbers or log_probs.shape[1] < 4 * numbers[0]:
        return _cut_in_order(log_probs, top_p, np.argsort(-log_probs, axis=1, kind="stable"))
    columns = largest_columns(log_probs, numbers[0])
    few = np.take_along_axis(log_probs, columns, axis=1)
    order = np.take_along_axis(columns, np.argsort(-few, axis=1, kind="stable"), axis=1)
    kept = _cut_in_order(log_probs, top_p, order)
    are_too_few = np.exp(few).sum(axis=1) < top_p + _NEAR
    if are_too_few.any():
        kept[are_too_few] = _cut_top_p(log_probs[are_too_few], top_p, numbers[1:])
    return kept


def _cut_in_order(log_probs: Floats, top_p: float, order: NDArray[np.int64]) -> Floats:
    """Keep the first tokens of ``order``, (num_rows, n), until they reach ``top_p``."""
    ordered = np.take_along_axis(log_probs, order, axis=1)
    probs = np.exp(ordered)
    is_cut = np.cumsum(probs, axis=1) - probs >= top_p  # mass before this token
    is_cut[:, 0] = False
    kept = np.full_like(log_probs, -np.inf)
    np.put_along_axis(kept, order, np.where(is_cut, -np.inf, ordered), axis=1)
    return kept


def num_searched(config: DecodingConfig) -> int:
    """Return how many candidates of a layer beam search takes, so that W of them go on."""
    return config.num_beams * max(2, 1 + len(config.eos_ids))


def _cut_typical(log_probs: Floats, mass: float) -> Floats:
    """Set all but the fewest tokens nearest to the entropy that reach ``mass`` to -inf.

    Tokens as near as the last of them stay too.
    """
    finite = np.where(np.isfinite(log_probs), log_probs, 0.0)
    entropy = -row_sums(finite * np.exp(log_probs))
    distances = np.abs(-log_probs - entropy)
    order = np.argsort(distances, axis=1, kind="stable")
    reached = np.cumsum(np.exp(np.take_along_axis(log_probs, order, axis=1)), axis=1)
    last = np.minimum((reached < mass).sum(axis=1, keepdims=True), log_probs.shape[1] - 1)
    farthest = np.take_along_axis(distances, np.take_along_axis(order, last, axis=1), axis=1)
    return np.where(distances > farthest, -np.inf, log_probs)


def looks_beyond(warp: Warp, spec: EngineSpec) -> bool:
    """Return whether sampling may draw tokens that a top-k head does not return."""
    num_top = spec.head.num_top_logits
    return num_top > 0 and not warp.is_raw and not 1 <= warp.top_k <= num_top


def check_top_k(target: EngineSpec, config: DecodingConfig) -> None:
    """Raise ConfigError for a request that reads more tokens than the target keeps; a draft may."""
    num_top, top_k = target.head.num_top_logits, Warp.of(config).top_k
    if not num_top or target.head.keeps_full_logits:
        return  # the others are read if they matter
    returns = f"but the target's engine returns the {num_top} largest logits of a position"
    if config.processes_logits:
        raise ConfigError(
            f"{', '.join(config.logits_options)} may raise tokens that are not among the {num_top} "
            "logits which the target's engine returns of a position, and it keeps no others; leave "
            "it out, or export again, where --logits topk keeps them all (or with --logits full)"
        )
    if 1 <= top_k <= num_top:
        return
    if config.row.rule == "search":
        raise ConfigError(
            f"num_beams is {config.num_beams}, for which strategy {config.strategy} looks at the "
            f"{top_k} best tokens of a position (top_k {top_k}), {returns} and keeps no others; "
            f"lower num_beams, or export again, where --logits topk keeps them all (or with "
            f"--logits full or --logits topk:{top_k})"
        )
    of_all = "" if top_k else " (all tokens)"
    raise ConfigError(
        f"top_k is {top_k}{of_all}, {returns} and keeps no others; use top_k 1 to {num_top}, or "
        "export again, where --logits topk keeps them all (or with --logits full)"
    )
