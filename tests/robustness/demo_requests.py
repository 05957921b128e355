"""Whole requests drawn at random for the demo engines, and what must hold of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from dsbd_errors import DsbdError
from dsbd_ort import DecodingConfig, GenerationResult, Pipeline, Service
from dsbd_ort.decoding import STRATEGIES
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


@st.composite
def demo_requests(draw: st.DrawFn) -> DemoRequest:
    """Draw a request; one in ten also has a field that it may not have."""
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
    options["constraint"] = constraint_of(options.get("constraint", "none"), VOCAB_SIZE, ())
    if draw(st.booleans()):
        options["stop_strings"] = draw(st.lists(st.sampled_from(STOPS), min_size=1, max_size=2))
    return DemoRequest(draw(st.sampled_from(PROMPTS)), options, draw(st.booleans()))


def check_demo_request(pipe: Pipeline, request: DemoRequest) -> bool:
    """Generate in every way there is and compare; False: the request is refused."""
    try:
        config = pipe.prepare(request.prompt, request.options).config
        result = pipe.generate(request.prompt, **request.options)
    except DsbdError as error:
        assert 10 < len(str(error)) < 600, error
        return False
    check_sequences(result, config)
    pieces = [piece.text for piece in pipe.stream(request.prompt, **request.options)]
    assert "".join(pieces) == result.sequences[0].text
    others = []
    if (plain := config_without_draft(config)) is not None:
        others.append(pipe.generate(request.prompt, **vars(plain)))
    # The threshold policy may look at near-ties of float32; all else must not differ.
    if request.is_shared and config.width_policy == "fixed":
        with Service(pipe) as service:
            others.append(service.generate(request.prompt, **request.options))
    for other in others:
        assert [s.token_ids for s in other.sequences] == [s.token_ids for s in result.sequences]
        assert [s.text for s in other.sequences] == [s.text for s in result.sequences]
    return True


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
