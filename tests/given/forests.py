"""Logits of prompts with given rows: by chunks, in a tree, and below a kept path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward
from dsbd_ort.prompts import RequestInputs

LOGIT_LIMIT = 2e-5


def forwarded(
    engine: Any, ids: Sequence[int], positions: Sequence[int], mask: NDArray[np.bool_], source: Any
) -> NDArray[np.float32]:
    forward = Forward(np.array(ids), np.array(positions), mask, np.arange(len(ids)), source=source)
    found: NDArray[np.float32] = engine.forward(forward).logits.whole
    return found


def check_forest(
    engine: Any, inputs: RequestInputs, logits_of: Callable[[list[int]], NDArray[np.float32]]
) -> None:
    """Compare an engine's logits with those of a path's every token by transformers."""
    prompt, source = list(inputs.prompt_ids), inputs.source
    size, wanted = len(prompt), logits_of(prompt)
    for start in range(0, size, 7):  # given rows before, in and after the same chunk
        stop = min(start + 7, size)
        mask = np.tri(size, dtype=np.bool_)[start:stop, :stop]
        found = forwarded(engine, prompt[start:stop], range(start, stop), mask, source)
        assert np.abs(found - wanted[start:stop]).max() <= LOGIT_LIMIT
    tokens, parents = [7, 9, 11, 13], [-1, -1, 0, 1]
    mask, paths = np.zeros((4, size + 4), np.bool_), list[list[int]]()
    mask[:, :size] = True
    for node, parent in enumerate(parents):
        mask[node] |= mask[parent] if parent >= 0 else False
        mask[node, size + node] = True
        paths.append([*(paths[parent] if parent >= 0 else prompt), tokens[node]])
    found = forwarded(engine, tokens, [size, size, size + 1, size + 1], mask, source)
    for row, path in zip(found, paths, strict=True):
        assert np.abs(row - logits_of(path)[-1]).max() <= LOGIT_LIMIT
    engine.keep(np.array([*range(size), size + 1, size + 3]))
    seen = np.ones((1, size + 3), np.bool_)
    found = forwarded(engine, [21], [size + 2], seen, source)
    assert np.abs(found[0] - logits_of([*paths[3], 21])[-1]).max() <= LOGIT_LIMIT
    assert np.abs(wanted).max() > 1  # a limit of rounding
