"""Token laws from an engine call: from all logits, or from the candidates that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.engine_call import EngineOutputs
from dsbd_ort.decoding.errors import ConfigError, ModelError
from dsbd_ort.decoding.step_model import CandidateModel, Candidates, StepModel, candidate_model
from dsbd_ort.decoding.warp import AnyLaw, Warp


class LawSource(Protocol):
    """Makes token laws of what an engine call returned."""

    def laws(self, outputs: EngineOutputs, num_rows: int) -> Sequence[AnyLaw]:
        """Return the laws after the ``num_rows`` rows that were asked for."""


def law_source(model: StepModel, warp: Warp, role: str) -> LawSource:
    """Return the laws of a model: by its candidates where it offers them, else by its logits.

    ``role``, "target" or "draft", is what errors call the model.
    """
    with_candidates = candidate_model(model)
    laws = CandidateLaws(with_candidates, warp) if with_candidates else LogitLaws(model, warp)
    return NamedLaws(role, laws)


class NamedLaws:
    """Laws of a model whose errors say which model, and which of its calls in this request."""

    def __init__(self, role: str, source: LawSource) -> None:
        self._role = role
        self._source = source
        self._num_calls = 0

    def laws(self, outputs: EngineOutputs, num_rows: int) -> Sequence[AnyLaw]:
        """See LawSource.laws."""
        self._num_calls += 1
        try:
            return self._source.laws(outputs, num_rows)
        except ModelError as error:
            raise ModelError(f"call {self._num_calls} of the {self._role}: {error}") from error


class LogitLaws:
    """Laws from all logits of a row."""

    def __init__(self, model: StepModel, warp: Warp) -> None:
        self._model = model
        self._warp = warp

    def laws(self, outputs: EngineOutputs, num_rows: int) -> Sequence[AnyLaw]:
        """See LawSource.laws."""
        logits = cast(NDArray[np.float32], outputs)
        _check_shape("logits", logits, (num_rows, self._model.vocab_size))
        return self._warp.laws(logits)


class CandidateLaws:
    """Laws from the largest logits of a row; no array of the vocabulary's size is made."""

    def __init__(self, model: CandidateModel, warp: Warp) -> None:
        self._vocab_size = model.vocab_size
        self._num_candidates = model.num_candidates
        self._warp = warp

    def laws(self, outputs: EngineOutputs, num_rows: int) -> Sequence[AnyLaw]:
        """See LawSource.laws."""
        found = cast(Candidates, outputs)
        wanted = (num_rows, self._num_candidates)
        _check_shape("top_ids", found.top_ids, wanted)
        _check_shape("top_logits", found.top_logits, wanted)
        _check_shape("logsumexp", found.logsumexp, wanted[:1])
        _check_ids(found.top_ids, self._vocab_size)
        return self._warp.laws_of_candidates(found.top_ids, found.top_logits, found.logsumexp)


def check_top_k(role: str, model: StepModel, config: DecodingConfig, top_k: int) -> None:
    """Refuse a request that looks at more tokens of a position than the model returns.

    Args:
        role: "target" or "draft".
        model: any; one that returns all logits takes every request.
        config: the request.
        top_k: most tokens of a position that its rule looks at (``Warp.top_k``), 0 for all.

    Raises:
        ConfigError: naming what to change.
    """
    with_candidates = candidate_model(model)
    if with_candidates is None or 1 <= top_k <= with_candidates.num_candidates:
        return
    most = with_candidates.num_candidates
    returns = f"but the {role}'s engine returns {most} candidates of a position"
    if config.row.rule == "search":
        raise ConfigError(
            f"num_beams is {config.width}, for which strategy {config.strategy} looks at the "
            f"{top_k} best tokens of a position (top_k {top_k}), {returns}; lower num_beams, or "
            f"export with --logits full or --logits topk:{top_k}"
        )
    of_all = "" if top_k else " (all tokens)"
    larger = f" or --logits topk:{top_k}" if most < top_k <= model.vocab_size else ""
    raise ConfigError(
        f"top_k is {top_k}{of_all}, {returns}; use top_k 1 to {most}, or export with --logits "
        f"full{larger}"
    )


def _check_shape(name: str, found: NDArray[np.generic], wanted: tuple[int, ...]) -> None:
    if found.shape != wanted:
        raise ModelError(
            f"the model returned {name} of shape {found.shape}, expected {wanted}: one row per "
            "entry of logit_rows"
        )


def _check_ids(top_ids: NDArray[np.int64], vocab_size: int) -> None:
    if top_ids.size and not (0 <= top_ids.min() and top_ids.max() < vocab_size):
        raise ModelError(
            f"the model returned top_ids from {top_ids.min()} to {top_ids.max()}, expected 0 to "
            f"{vocab_size - 1}; export the engine again"
        )
