"""Comparisons of requests with media: logits, searches by transformers, requests together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dsbd_forward.forward import Forward
from dsbd_ort import Pipeline
from dsbd_ort.decoding import DecodeResult, DecodingRequest
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.whole_requests import decoded_together
from dsbd_ort.requests.prompts import RequestInputs
from dsbd_runtime.parts.given.given_prompt import GivenPrompt
from dsbd_runtime.parts.given.given_rows import GivenRows
from tests.robustness.preempting import TALLY, ForcedPreemptions

LOGIT_LIMIT = 2e-5
Searched = tuple[list[list[int]], list[float]]
"""The new tokens of every beam up to its end, and their scores, if there are several."""
ENDS = (42, 77, 120)
STRATEGIES = [
    {"strategy": "greedy"},
    {"strategy": "beam-search", "num_beams": 4, "num_return_sequences": 4},
    {
        **{"strategy": "speculative-beam-search", "num_beams": 4, "num_return_sequences": 4},
        **{"draft_length": 3, "draft_beams": 6},
    },
    {"strategy": "dsbd", "num_beams": 3, "draft_length": 3, "num_return_sequences": 3},
]
Rows = NDArray[np.float32]


@dataclass
class Example:
    """A prompt with media: ours, and what transformers' own processor makes of the same.

    Attributes:
        theirs: arguments of the forward of transformers' model.
    """

    inputs: RequestInputs
    theirs: dict[str, torch.Tensor]


class Kind:
    """A tiny model of one kind: exported and opened, and its checkpoint in transformers.

    A case is a tuple of media, each described by its size; () is text alone.

    Attributes:
        encoded: cases whose rows of the encoder are compared.
        paths: cases whose logits are compared.
        read: cases whose searches are compared; ``more``: further ones, which take minutes.
        eight: cases of requests that are decoded together.
        options: of requests; ``their_options``: the same, of ``generate``.
    """

    encoded: Sequence[Any]
    paths: Sequence[Any]
    read: Sequence[Any]
    more: Sequence[Any]
    eight: Sequence[Any]
    options: Mapping[str, Any] = {}
    their_options: Mapping[str, Any] = {}
    token_name = "input_ids"

    def __init__(self, name: str, pipe: Pipeline, folder: Path) -> None:
        """``folder``: of the checkpoint."""
        self.name, self.pipe = name, pipe
        self.model = self.load(folder)

    def load(self, folder: Path) -> Any:
        raise NotImplementedError

    def example(self, case: Any, seed: int = 0) -> Example:
        raise NotImplementedError

    def prompts(self) -> Sequence[Example]:
        """Return examples whose prompts are made of conversations by both."""
        return []

    def rows(self, example: Example) -> Rows:
        """Return the encoder's rows of an example by transformers."""
        raise NotImplementedError

    def own_rows(self, example: Example) -> Rows:
        source = example.inputs.source
        assert isinstance(source, GivenPrompt)
        with self.pipe.models.engines() as (engine, _):
            encoder = engine.part(GivenRows).encoder
            return np.concatenate([encoder.rows(piece) for piece in source.pieces])

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], example: Example) -> Rows:
        """Return the logits of every token of a path that begins with an example's prompt."""
        ids = torch.tensor([list(token_ids)])
        given = {**example.theirs, self.token_name: ids}
        if "attention_mask" in given:
            given["attention_mask"] = torch.ones_like(ids)
        return np.asarray(self.model(**given).logits[0].numpy())

    def searched(self, example: Example, beams: int) -> Searched:
        return searched(self.model, {**example.theirs, **self.their_options}, beams)

    def request(self, example: Example, **options: Any) -> DecodingRequest:
        known = {"max_new_tokens": 14, "eos_token_id": ENDS, "seed": 1, **self.options}
        return self.pipe.request_of(example.inputs, {**known, **options})

    def requests(self, **options: Any) -> list[DecodingRequest]:
        """Return the requests that are decoded together, each with a seed of its own."""
        cases = enumerate(self.eight)
        return [
            self.request(self.example(c, seed), **{**options, "seed": seed}) for seed, c in cases
        ]


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


@torch.no_grad()
def searched(model: Any, arguments: Mapping[str, Any], beams: int, **options: Any) -> Searched:
    """Return the result of transformers' search; ``arguments``: of the model's forward."""
    name = next(each for each in ("decoder_input_ids", "input_ids") if each in arguments)
    ids = arguments[name]
    masked = {} if name == "decoder_input_ids" else {"attention_mask": torch.ones_like(ids)}
    found = model.generate(
        **{**masked, **arguments},
        num_beams=beams,
        num_return_sequences=beams,
        max_new_tokens=14,
        do_sample=False,
        eos_token_id=list(ENDS),
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    rows = found.sequences[:, ids.shape[1] :].tolist()
    cuts = [next((n + 1 for n, t in enumerate(row) if t in ENDS), len(row)) for row in rows]
    scores = [] if beams == 1 else found.sequences_scores.tolist()
    return [row[:cut] for row, cut in zip(rows, cuts, strict=True)], scores


def check_equal(found: Sequence[DecodeResult], wanted: Sequence[DecodeResult]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        for one, other in zip(ours.sequences, theirs.sequences, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprob == pytest.approx(other.logprob, abs=2e-5)


def together(pipe: Pipeline, requests: Sequence[DecodingRequest]) -> list[DecodeResult]:
    """Decode requests together, up to eight at a time, with an empty cache."""
    with pipe.models.engines() as models:
        return decoded_together(BatchedDecoder(*models), list(requests), 8)


def check_together(
    pipe: Pipeline, make: Callable[[], Sequence[DecodingRequest]]
) -> list[DecodeResult]:
    """Compare eight requests together, and preempted, with each alone; return the latter."""
    alone = [result for request in make() for result in together(pipe, [request])]
    check_equal(together(pipe, make()), alone)
    before = TALLY.num_preempted
    preempted = [
        replace(request, preempts=ForcedPreemptions(seed)) for seed, request in enumerate(make())
    ]
    check_equal(together(pipe, preempted), alone)
    assert TALLY.num_preempted > before
    return alone
