"""Token laws from what an engine call returned: all logits of a row, or the largest of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.errors import ConfigError, ModelError
from dsbd_ort.decoding.step_model import Logits, Role, RowCache, TopLogits, num_top_logits
from dsbd_ort.decoding.warp import AnyLaw, Warp


class LawSource:
    """The laws of one model for one request; its errors say which model and which call."""

    def __init__(self, role: Role, model: RowCache, warp: Warp) -> None:
        self._role = role
        self._vocab_size = model.vocab_size
        self._num_top_logits = num_top_logits(model)
        self._warp = warp
        self._num_calls = 0

    def laws(self, logits: Logits, num_rows: int) -> Sequence[AnyLaw]:
        """Return the laws after the ``num_rows`` rows whose logits a call returned.

        Raises:
            ModelError: logits of another shape, or that are no logits.
        """
        self._num_calls += 1
        try:
            if isinstance(logits, tuple):
                self._check_top(logits, num_rows)
                return self._warp.laws_of_candidates(*logits)
            _check_shape("logits", logits, (num_rows, self._vocab_size))
            return self._warp.laws(logits)
        except ModelError as error:
            raise ModelError(f"call {self._num_calls} of the {self._role}: {error}") from error

    def _check_top(self, logits: TopLogits, num_rows: int) -> None:
        top_ids, top_logits, logsumexp = logits
        expected = (num_rows, self._num_top_logits)
        _check_shape("top_ids", top_ids, expected)
        _check_shape("top_logits", top_logits, expected)
        _check_shape("logsumexp", logsumexp, expected[:1])
        _check_ids(top_ids, self._vocab_size)


def check_top_k(role: Role, model: RowCache, config: DecodingConfig, top_k: int) -> None:
    """Refuse a request that looks at more tokens of a position than the model returns.

    Args:
        role: "target" or "draft".
        model: any; one that returns all logits takes every request.
        config: the request.
        top_k: most tokens of a position that its rule looks at (``Warp.top_k``), 0 for all.

    Raises:
        ConfigError: naming what to change.
    """
    most = num_top_logits(model)
    if not most or 1 <= top_k <= most:
        return
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
