"""Whole requests drawn at random for real engines, and what must hold of each."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from dsbd_errors import DsbdError
from dsbd_ort import Canonical, DecodingConfig, GenerationResult, Pipeline, Regex, Service
from dsbd_ort.decoding import STRATEGIES, WithResult
from dsbd_ort.requests.results import text_before_stop
from dsbd_runtime.text.stream_decoder import TextWindow
from tests.continuations import spelled_text, without_special
from tests.robustness.preempting import PreemptedPipeline
from tests.robustness.whole_request_checks import config_without_draft
from tests.robustness.whole_requests import VALUES, constraint_of, has_meaning, scorers_of


@dataclass(frozen=True)
class Texts:
    """Values that requests to a bundle are drawn from.

    Attributes:
        prompts: texts or tokens; of an encoder-decoder its sources.
        languages: names that such a model translates between.
        special: a special token and its id.
        most_new_tokens: of a request.
    """

    prompts: tuple[Any, ...]
    stops: tuple[str, ...]
    vocab_size: int
    languages: tuple[str, ...] = ()
    special: tuple[str, int] = ("<|begin|>", 0)
    most_new_tokens: int = 12


DEMO_TEXTS = Texts(
    prompts=(
        "import os",
        "def read_json(path):",
        "class Node:\n    def __init__(self):",
        "x = 'é😀'",
        "\n",
    ),
    stops=("\n", "(", "self", "é", "return None", "\n\n"),
    vocab_size=4096,
)
CANONICAL = Canonical(Regex("((de|re|in|se|x)[ (]?)+"))
"""Words that tokenizers write in several ways, of which theirs is one."""


@dataclass(frozen=True)
class DemoRequest:
    """A prompt, the options of a request, and whether a Service is to answer as well.

    Attributes:
        options: fields of DecodingConfig, and languages.
        companion: the prompt of a request that shares the engine calls; None: there is none.
    """

    prompt: Any
    options: dict[str, Any]
    is_shared: bool
    companion: Any = None

    @property
    def languages(self) -> dict[str, str]:
        """The language of the source; that of the target is its first token to a config."""
        return {name: self.options[name] for name in ("src_lang",) if name in self.options}

    def given(self, pipes: Pipes) -> dict[str, Any]:
        """The prompt by the name that it has to the model."""
        return {"source" if pipes.reads_source else "prompt": self.prompt}


@dataclass(frozen=True)
class Pipes:
    """One bundle opened twice: as anybody would, and with requests that are preempted by force.

    The second may be on another provider, whose tokens are then those of the CPU.
    """

    calm: Pipeline
    forced: PreemptedPipeline

    @property
    def reads_source(self) -> bool:
        """Whether the bundle is an encoder-decoder's."""
        return self.calm.bundle.manifest.target.encoder is not None

    @property
    def is_bit_exact(self) -> bool:
        """Whether the bundle claims that a row's logits are a function of its path."""
        return bool(self.calm.bundle.manifest.target.bit_exact)


@st.composite
def demo_requests(draw: st.DrawFn, most_top_k: int = 0, texts: Texts = DEMO_TEXTS) -> DemoRequest:
    """Draw a request; one in ten also has a field that it may not have.

    most_top_k: of engines with a top-k head, from which no more tokens can be drawn.
    """
    strategy = draw(st.sampled_from([*STRATEGIES]))
    rarely = draw(st.integers(0, 9)) == 0
    names = [name for name in VALUES if has_meaning(name, strategy) or rarely]
    chosen = draw(st.lists(st.sampled_from(names), max_size=6, unique=True))
    options: dict[str, Any] = {
        "strategy": strategy,
        "max_new_tokens": draw(st.integers(1, texts.most_new_tokens)),
        "seed": draw(st.integers(0, 2**31)),
        **{name: draw(VALUES[name]) for name in chosen},
    }
    if "predicted_token_ids" in options and draw(st.booleans()):
        options["predicted_text"] = draw(st.sampled_from([*texts.stops, "class Node:\n    def"]))
        if not rarely:  # both together are refused
            del options["predicted_token_ids"]
    if most_top_k and STRATEGIES[strategy].rule != "search":
        options["top_k"] = draw(st.integers(1, most_top_k))
    kind = options.get("constraint", "none")
    options["constraint"] = constraint_of(kind, texts.vocab_size, ())
    options["scorers"] = scorers_of(options.get("scorers", ()), texts.vocab_size)
    if kind != "none" and draw(st.booleans()):
        options["constraint"] = CANONICAL
    if draw(st.booleans()):
        stops = st.lists(st.sampled_from(texts.stops), min_size=1, max_size=2)
        options["stop_strings"] = draw(stops)
        if draw(st.booleans()):
            name, token_id = texts.special
            options["stop_strings"].append(draw(special_stops(name, texts.stops)))
            options["logit_bias"] = {token_id: draw(st.sampled_from([3.0, 9.0]))}
    if texts.languages:
        options |= draw(languages_of_requests(texts.languages))
        if "tgt_lang" in options and not rarely:  # both say how a target begins
            options.pop("forced_bos_token_id", None)
    # a language needs a text to be the source, and the options of both are the same
    in_text = [each for each in texts.prompts if isinstance(each, str) or not texts.languages]
    companion = draw(st.none() | st.sampled_from(in_text))
    fits_service = options.get("num_beams", 1) < 1024  # whose cache has 16,384 rows
    is_shared = draw(st.booleans()) and fits_service
    return DemoRequest(draw(st.sampled_from(texts.prompts)), options, is_shared, companion)


def special_stops(name: str, stops: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Draw stop strings that name a special token, alone, twice, or next to text."""
    around = [name, name * 2, *(text + name for text in stops), *(name + text for text in stops)]
    return st.sampled_from([name] * 4 + around)


def languages_of_requests(languages: tuple[str, ...]) -> st.SearchStrategy[dict[str, str]]:
    """Draw the languages of a request, or none; one in many is unknown."""
    name = st.sampled_from([*languages * 5, "xxx_Latn"])
    return st.fixed_dictionaries({}, optional={"src_lang": name, "tgt_lang": name})


def check_demo_request(pipes: Pipes, request: DemoRequest) -> bool:
    """Generate in every way there is and compare; False: the request is refused.

    What it is compared with is preempted again and again.
    """
    try:
        prepared = pipes.calm.prepare(request.prompt, request.options)
        result = pipes.calm.generate(**request.given(pipes), **request.options)
    except DsbdError as error:
        assert 10 < len(str(error)) < 600, error
        return False
    config = prepared.config
    check_sequences(result, config)
    if config.stop_strings and not config.min_new_tokens:
        start = pipes.calm.text_start(prepared.prompt_ids, config)
        check_stopped_texts(result, config, start)
    stream = WithResult(pipes.forced.stream(request.prompt, **request.options))
    pieces = [piece.text for piece in stream]
    # The threshold policy may look at near-ties of float32; all else must not differ.
    if config.width_policy == "threshold" and not pipes.is_bit_exact:
        return True
    if config.coupling == "rejection" and config.has_ngram_drafter:
        return True  # the output depends on the draft, which earlier requests have changed
    assert "".join(pieces) == result.sequences[0].text
    others = [stream.result]
    if (plain := config_without_draft(config)) is not None:
        others.append(pipes.forced.generate(request.prompt, **vars(plain), **request.languages))
    if request.is_shared:
        others.append(of_a_service(pipes, request))
    if request.companion is not None and (found := of_a_list(pipes, request)) is not None:
        others.append(found)
    for other in others:
        assert [s.token_ids for s in other.sequences] == [s.token_ids for s in result.sequences]
        assert [s.text for s in other.sequences] == [s.text for s in result.sequences]
        check_log_probs(other, result, is_bit_exact=pipes.is_bit_exact)
    return True


def check_stopped_texts(
    result: GenerationResult, config: DecodingConfig, start: TextWindow
) -> None:
    """Hold texts against stop strings in the text and in the text with special tokens spelled."""
    for sequence in result.sequences:
        text = start.text_of(sequence.token_ids)
        spelled = spelled_text(start, sequence.token_ids)
        has_ended = any(stop in text or stop in spelled for stop in config.stop_strings)
        assert not has_ended or sequence.finish_reason != "length"
        cut = without_special(start.tokenizer, text_before_stop(spelled, config.stop_strings))
        assert sequence.text == min(text_before_stop(text, config.stop_strings), cut, key=len)


def of_a_service(pipes: Pipes, request: DemoRequest) -> GenerationResult:
    """Generate in a Service, which has a request for the other prompt first."""
    with Service(pipes.forced) as service:
        if request.companion is not None:
            with contextlib.suppress(DsbdError):
                service.submit(request.companion, request.options, lambda event: None)
        return service.generate(request.prompt, **request.options)


def of_a_list(pipes: Pipes, request: DemoRequest) -> GenerationResult | None:
    """Generate in a list with the other prompt, None if that is refused."""
    try:
        return pipes.forced.generate([request.prompt, request.companion], **request.options)[0]
    except DsbdError:
        with pytest.raises(DsbdError):
            pipes.calm.generate(request.companion, **request.options)
        return None


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
            assert not any(stop in sequence.text for stop in config.stop_strings)
        if sequence.finish_reason == "length":
            assert len(sequence.token_ids) == config.max_new_tokens
    scores = [sequence.score for sequence in result.sequences]
    assert scores == sorted(scores, reverse=True)
