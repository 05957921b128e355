"""Whole requests drawn at random for the demo engines, and what must hold of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dsbd_errors import DsbdError
from dsbd_ort import DecodingConfig, GenerationResult, Pipeline, Service
from dsbd_ort.decoding import STRATEGIES, WithResult
from tests.robustness.preempting import PreemptedPipeline
from tests.robustness.whole_request_checks import config_without_draft
from tests.robustness.whole_requests import VALUES, constraint_of, has_meaning

PROMPTS = [
    "import os",
    "def read_json(path):",
    "class Node:\n    def __init__(self):",
    "x = 'é😀'",
    "\n",
]
VOCAB_SIZE = 4096
STOPS = ["\n", "(", "self", "é", "return None", "\n\n"]


@dataclass(frozen=True)
class DemoRequest:
    """A prompt, the fields of DecodingConfig, and whether a Service is to answer as well."""

    prompt: str
    options: dict[str, Any]
    is_shared: bool


@dataclass(frozen=True)
class Pipes:
    """One bundle opened twice: as anybody would, and with requests that are preempted by force."""

    calm: Pipeline
    forced: PreemptedPipeline

    @property
    def is_bit_exact(self) -> bool:
        """Whether the bundle claims that a row's logits are a function of its path."""
        return bool(self.calm.bundle.manifest.target.bit_exact)


@st.composite
def demo_requests(draw: st.DrawFn, most_top_k: int = 0) -> DemoRequest:
    """Draw a request; one in ten also has a field that it may not have.

    most_top_k: of engines with a top-k head, from which no more tokens can be drawn.
    """
    strategy = draw(st.sampled_from([*STRATEGIES]))
    rarely = draw(st.integers(0, 9)) == 0
    names = [name for name in VALUES if has_meaning(name, strategy) or rarely]
    chosen = draw(st.lists(st.sampled_from(names), max_size=6, unique=True))
    options: dict[str, Any] = {
        "strategy": strategy,
        "max_new_tokens": draw(st.integers(1, 12)),
        "seed": draw(st.integers(0, 2**31)),
        **{name: draw(VALUES[name]) for name in chosen},
    }
    if most_top_k and STRATEGIES[strategy].rule != "search":
        options["top_k"] = draw(st.integers(1, most_top_k))
    options["constraint"] = constraint_of(options.get("constraint", "none"), VOCAB_SIZE, ())
    if draw(st.booleans()):
        options["stop_strings"] = draw(st.lists(st.sampled_from(STOPS), min_size=1, max_size=2))
    return DemoRequest(draw(st.sampled_from(PROMPTS)), options, draw(st.booleans()))


def check_demo_request(pipes: Pipes, request: DemoRequest) -> bool:
    """Generate in every way there is and compare; False: the request is refused.

    What it is compared with is preempted again and again.
    """
    try:
        config = pipes.calm.prepare(request.prompt, request.options).config
        result = pipes.calm.generate(request.prompt, **request.options)
    except DsbdError as error:
        assert 10 < len(str(error)) < 600, error
        return False
    check_sequences(result, config)
    stream = WithResult(pipes.forced.stream(request.prompt, **request.options))
    pieces = [piece.text for piece in stream]
    # The threshold policy may look at near-ties of float32; all else must not differ.
    if config.width_policy == "threshold" and not pipes.is_bit_exact:
        return True
    assert "".join(pieces) == result.sequences[0].text
    others = [stream.result]
    if (plain := config_without_draft(config)) is not None:
        others.append(pipes.forced.generate(request.prompt, **vars(plain)))
    if request.is_shared:
        with Service(pipes.forced) as service:
            others.append(service.generate(request.prompt, **request.options))
    for other in others:
        assert [s.token_ids for s in other.sequences] == [s.token_ids for s in result.sequences]
        assert [s.text for s in other.sequences] == [s.text for s in result.sequences]
        check_log_probs(other, result, is_bit_exact=pipes.is_bit_exact)
    return True


def check_log_probs(
    other: GenerationResult, result: GenerationResult, *, is_bit_exact: bool
) -> None:
    """Hold the log-probabilities against each other: equal bits where these are claimed."""
    if is_bit_exact:
        assert list(map(vars, other.sequences)) == list(map(vars, result.sequences))
        assert other.prompt_logprobs == result.prompt_logprobs
        return
    for ours, theirs in zip(other.sequences, result.sequences, strict=True):
        np.testing.assert_allclose(ours.token_logprobs, theirs.token_logprobs, atol=1e-4)


def check_sequences(result: GenerationResult, config: DecodingConfig) -> None:
    for sequence in result.sequences:
        assert 1 <= len(sequence.token_ids) <= config.max_new_tokens
        assert all(math.isfinite(p) and p <= 0.0 for p in sequence.token_logprobs)
        if not config.min_new_tokens:
            assert not any(stop in sequence.text for stop in config.stop_texts)
        if sequence.finish_reason == "length":
            assert len(sequence.token_ids) == config.max_new_tokens
    scores = [sequence.score for sequence in result.sequences]
    assert scores == sorted(scores, reverse=True)
