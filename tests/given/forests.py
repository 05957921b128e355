"""Logits of a prompt with given rows or a source, and searches after it, by transformers too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dsbd_forward.forward import Forward
from dsbd_ort.requests.prompts import RequestInputs

LOGIT_LIMIT = 2e-5


def forwarded(
    engine: Any, ids: Sequence[int], positions: Sequence[int], mask: NDArray[np.bool_], source: Any
) -> NDArray[np.float32]:
    forward = Forward(np.array(ids), np.array(positions), mask, np.arange(len(ids)), source=source)
    found: NDArray[np.float32] = engine.forward(forward).logits.whole
    return found


def check_forest(
    engine: Any, inputs: RequestInputs, logits_of: Callable[[list[int]], NDArray[np.float32]]
) -> dict[str, float]:
    """Compare an engine's logits with those of a path's every token by transformers.

    Returns the largest errors of the prompt in chunks, of a tree, and below a kept path.
    """
    prompt, source = list(inputs.prompt_ids), inputs.source
    size, wanted = len(prompt), logits_of(prompt)
    errors = dict.fromkeys(("prompt", "tree", "kept path"), 0.0)

    def compare(place: str, found: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
        errors[place] = max(errors[place], float(np.abs(found - wanted).max()))
        assert errors[place] <= LOGIT_LIMIT, place

    for start in range(0, size, 7):  # given rows before, in and after the same chunk
        stop = min(start + 7, size)
        mask = np.tri(size, dtype=np.bool_)[start:stop, :stop]
        found = forwarded(engine, prompt[start:stop], range(start, stop), mask, source)
        compare("prompt", found, wanted[start:stop])
    tokens, parents = [7, 9, 11, 13], [-1, -1, 0, 1]
    mask, paths = np.zeros((4, size + 4), np.bool_), list[list[int]]()
    mask[:, :size] = True
    for node, parent in enumerate(parents):
        mask[node] |= mask[parent] if parent >= 0 else False
        mask[node, size + node] = True
        paths.append([*(paths[parent] if parent >= 0 else prompt), tokens[node]])
    found = forwarded(engine, tokens, [size, size, size + 1, size + 1], mask, source)
    for row, path in zip(found, paths, strict=True):
        compare("tree", row, logits_of(path)[-1])
    engine.keep(np.array([*range(size), size + 1, size + 3]))
    seen = np.ones((1, size + 3), np.bool_)
    found = forwarded(engine, [21], [size + 2], seen, source)
    compare("kept path", found[0], logits_of([*paths[3], 21])[-1])
    assert np.abs(wanted).max() > 1  # a limit of rounding
    return errors


Searched = tuple[list[list[int]], list[float]]
"""The new tokens of every beam up to its end, and their scores, if there are several."""


@torch.no_grad()
def searched(
    model: Any, arguments: Mapping[str, Any], beams: int, length: int, ends: Sequence[int]
) -> Searched:
    """Return the result of transformers' search; ``arguments``: of the model's forward."""
    ids = arguments["input_ids"]
    found = model.generate(
        **{"attention_mask": torch.ones_like(ids), **arguments},
        num_beams=beams,
        num_return_sequences=beams,
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=list(ends),
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = found.sequences[:, ids.shape[1] :].tolist()
    cuts = [next((n + 1 for n, t in enumerate(row) if t in ends), len(row)) for row in rows]
    scores = [] if beams == 1 else found.sequences_scores.tolist()
    return [row[:cut] for row, cut in zip(rows, cuts, strict=True)], scores
