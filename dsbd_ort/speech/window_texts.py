"""Texts of one window: a search at temperature 0, then samples at higher ones, until one is good.

Only the text of the last temperature is used. So a request is stopped once its text is certain to
be poor. For a text that repeats itself this is certain long before its length limit.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from dsbd_forward.forward import Source
from dsbd_ort.decoding import STRATEGIES, DecodeResult, DecodingConfig, DecodingRequest
from dsbd_ort.decoding.logits_processing.allowed_after import AllowedMass
from dsbd_ort.decoding.result import DecodedSequence
from dsbd_ort.decoding.stats import DecodingStats
from dsbd_ort.requests.option_defaults import DRAFTING
from dsbd_ort.requests.prompts import RequestInputs
from dsbd_ort.scorers import added_score
from dsbd_ort.speech.hot_words import HotWords
from dsbd_ort.speech.speech_request import SpeechRequest
from dsbd_runtime.text.tokenizer import Tokenizer

_AT_THE_SEAM = 16  # bytes
_OF_BEAMS = ("strategy", "num_beams", "early_stopping", "draft_beams")

Requests = Sequence[DecodingRequest]
"""Independent requests, whose engine calls may be shared."""


class HoldsSources(Protocol):
    """Engines that read sources."""

    def held_source(self, source: Source) -> AbstractContextManager[None]:
        """Keep a window's encoder output between its requests."""


class SpeechPipeline(Protocol):
    """The part of a pipeline that a transcription uses."""

    tokenizer: Tokenizer
    has_draft: bool

    @property
    def models(self) -> HoldsSources:
        """The engines."""

    def request_of(
        self,
        inputs: RequestInputs,
        options: Mapping[str, Any] | DecodingConfig,
        *,
        allowed_mass: AllowedMass | None = None,
    ) -> DecodingRequest:
        """Return a validated request."""


@dataclass(frozen=True)
class WindowText:
    """A window's text at one temperature, without its end token; fields as in ``Segment``."""

    sequence: DecodedSequence
    token_ids: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float

    def is_poor(self, request: SpeechRequest) -> bool:
        max_ratio, min_logprob = request.compression_ratio_threshold, request.logprob_threshold
        return (max_ratio is not None and self.compression_ratio > max_ratio) or (
            min_logprob is not None and self.avg_logprob < min_logprob
        )

    def is_silence(self, request: SpeechRequest, no_speech_prob: float) -> bool:
        """Return whether the window is silence: its text and speech are both improbable."""
        return is_likely_silence(request, no_speech_prob) and (
            request.logprob_threshold is not None and self.avg_logprob < request.logprob_threshold
        )


def is_likely_silence(request: SpeechRequest, no_speech_prob: float) -> bool:
    """Return whether a window counts as silence, provided that its text is improbable."""
    max_no_speech, min_logprob = request.no_speech_threshold, request.logprob_threshold
    return max_no_speech is not None and min_logprob is not None and no_speech_prob > max_no_speech


class _Sample:
    """One request for a window's text.

    answers: the texts, the best first; set by ``take``.
    is_given_up: whether the request was stopped before its text ended, because it is poor.
    """

    def __init__(
        self,
        request: DecodingRequest,
        mass: AllowedMass,
        temperature: float,
        texts: WindowTexts,
    ) -> None:
        self.request = request
        self.answers: list[WindowText] = []
        self.is_given_up = False
        self._mass, self._temperature, self._texts = mass, temperature, texts

    def may_give_up(self) -> _Sample:
        """Stop the request once its text is certain to be poor; return the sample."""
        self.request = dataclasses.replace(self.request, gives_up=self._gives_up)
        return self

    def again(self) -> _Sample:
        mass, seed = AllowedMass(), self.request.config.seed
        request = dataclasses.replace(
            self.request, rng=np.random.default_rng(seed), allowed_mass=mass, gives_up=None
        )
        return _Sample(request, mass, self._temperature, self._texts)

    def take(self, result: DecodeResult) -> None:
        self._texts.stats.append(result.stats)
        self.answers = [self._rated(sequence) for sequence in result.sequences]

    def _gives_up(self, beam_tokens: list[list[int]], ended: list[DecodedSequence]) -> bool:
        request, most_tokens = self._texts.speech_request, self.request.config.max_new_tokens
        threshold, vocab_size = request.compression_ratio_threshold, request.vocab_size
        self.is_given_up = (
            threshold is not None
            and all(
                least_compression_ratio(tokens, most_tokens, vocab_size) > threshold
                for tokens in beam_tokens
            )
            and all(self._rated(sequence).is_poor(request) for sequence in ended)
        )
        return self.is_given_up

    def _rated(self, sequence: DecodedSequence) -> WindowText:
        """Rate a text; probabilities are normalized over allowed tokens, as in transformers."""
        token_ids, config = tuple(sequence.token_ids), self.request.config
        logprob = sequence.logprob
        if config.row.rule == "search":  # its score includes logits processing
            logprob = sequence.score * len(token_ids) ** config.length_penalty
        else:
            prompt_ids = self.request.prompt_ids
            logprob += sum(added_score(each, prompt_ids, token_ids) for each in config.scorers)
        logprob -= float(self._mass.before(token_ids).sum())
        ratio = compression_ratio(token_ids, self._texts.speech_request.vocab_size)
        has_ended = token_ids[-1] in config.eos_ids
        return WindowText(
            sequence,
            token_ids[:-1] if has_ended else token_ids,
            self._temperature,
            logprob / len(token_ids),
            ratio,
        )


Samples = Generator[Requests, list[DecodeResult], list[_Sample]]
Answers = Generator[Requests, list[DecodeResult], list[WindowText]]


class WindowTexts:
    """Decodes texts of windows at one temperature after another.

    stats: statistics of each engine request.
    """

    def __init__(
        self,
        pipeline: SpeechPipeline,
        request: SpeechRequest,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """``options``: for every engine request; those of ``request`` have precedence."""
        self.speech_request = request
        self._hot_words: list[HotWords] = []
        if request.hot_words and (gain := request.hot_word_gain):
            self._hot_words = [HotWords(request.hot_words, gain, request.vocab_size)]
        self._pipeline, self._options = pipeline, options
        self.stats: list[DecodingStats] = []

    def answers(self, inputs: RequestInputs, no_speech_prob: float) -> Answers:
        """Return a window's texts at the first temperature with a good text, or at the last one.

        The best text is the first. A stopped attempt may have been silence, which shows only in its
        whole text. If another attempt finds speech, the stopped one is decoded to its end. If not,
        the window is skipped anyway.
        """
        request, unknown = self.speech_request, list[list[_Sample]]()
        answers: list[WindowText] = []
        for number, temperature in enumerate(request.temperature, 1):
            is_last = number == len(request.temperature)
            samples = yield from self._sampled(inputs, temperature, may_give_up=not is_last)
            if any(sample.is_given_up for sample in samples):
                whole = _best_first(each for each in samples if not each.is_given_up)
                if all(answer.is_poor(request) for answer in whole):
                    # If one text is too probable to be silence, the best one is not silence either.
                    if not is_likely_silence(request, no_speech_prob) or not all(
                        answer.is_silence(request, no_speech_prob) for answer in whole
                    ):
                        continue
                    if not request.condition_on_previous_text:  # it depends on the temperature
                        unknown.append(samples)
                        continue
                samples = yield from _whole(samples)
            answers = _best_first(samples)
            if not answers[0].is_poor(request) or answers[0].is_silence(request, no_speech_prob):
                break
        if not answers[0].is_silence(request, no_speech_prob):
            for samples in unknown:
                earlier = _best_first((yield from _whole(samples)))
                if earlier[0].is_silence(request, no_speech_prob):
                    answers = earlier
                    break
        return answers[: request.num_return_sequences]

    def is_silence(self, text: WindowText, no_speech_prob: float) -> bool:
        """Return whether the window of an answer is skipped."""
        return text.is_silence(self.speech_request, no_speech_prob)

    def _sampled(self, inputs: RequestInputs, temperature: float, *, may_give_up: bool) -> Samples:
        samples = []
        for number in range(1 if temperature == 0.0 else self.speech_request.best_of):
            mass = AllowedMass()
            options = self._options_at(temperature, len(inputs.prompt_ids))
            if options.get("seed") is not None:
                options["seed"] = (options["seed"] + number) % 2**128
            request = self._pipeline.request_of(inputs, options, allowed_mass=mass)
            sample = _Sample(request, mass, temperature, self)
            samples.append(sample.may_give_up() if may_give_up else sample)
        return (yield from _decoded(samples))

    def _options_at(self, temperature: float, num_prompt: int) -> dict[str, Any]:
        options: dict[str, Any] = {**self._options, **self.speech_request.options}
        if self._hot_words:
            options["scorers"] = (*(options.get("scorers") or ()), *self._hot_words)
        if temperature == 0.0:
            wanted = self.speech_request.num_return_sequences
            more: dict[str, Any] = {"num_return_sequences": wanted} if wanted > 1 else {}
            strategy = options.get("strategy")
            if isinstance(strategy, str) and strategy in STRATEGIES:
                if STRATEGIES[strategy].rule == "sample":  # refused with a message at 0
                    more["temperature"] = temperature
            return {**options, "num_beams": self.speech_request.num_beams, **more}
        drafts = self._pipeline.has_draft or any(options.get(name) for name in DRAFTING)
        left_out = _OF_BEAMS if drafts else (*_OF_BEAMS, *DRAFTING)
        kept = {name: value for name, value in options.items() if name not in left_out}
        sampled = "speculative" if drafts else "sample"
        return {**kept, "strategy": sampled, "temperature": temperature}


def _decoded(samples: list[_Sample]) -> Samples:
    results = yield [sample.request for sample in samples]
    for sample, result in zip(samples, results, strict=True):
        sample.take(result)
    return samples


def _whole(samples: list[_Sample]) -> Samples:
    """Return the samples, with the stopped ones decoded to their end."""
    again = {i: sample.again() for i, sample in enumerate(samples) if sample.is_given_up}
    yield from _decoded(list(again.values()))
    return [again.get(i, sample) for i, sample in enumerate(samples)]


def _best_first(samples: Iterable[_Sample]) -> list[WindowText]:
    """Return the texts of samples, the most probable first; a search keeps its order."""
    samples = list(samples)
    answers = [answer for sample in samples for answer in sample.answers]
    if len(samples) > 1:
        answers.sort(key=lambda each: -each.avg_logprob)
    return answers


def compression_ratio(token_ids: Sequence[int], vocab_size: int) -> float:
    """Return the size of token ids over their compressed size; it is high if they repeat."""
    content = _bytes(token_ids, vocab_size)
    return len(content) / len(zlib.compress(content))


def least_compression_ratio(token_ids: Sequence[int], most_tokens: int, vocab_size: int) -> float:
    """Return a lower bound of the compression ratio of all texts that begin with token ids.

    zlib uses the shortest of its codes for a block, and a text of at most ``most_tokens`` is one
    block. So the compressed text is never longer than in the fixed code: the given tokens in that
    code, plus 9 bits for every further byte. At the seam the size may differ by ``_AT_THE_SEAM``.
    """
    content = _bytes(token_ids, vocab_size)
    coder = zlib.compressobj(strategy=zlib.Z_FIXED)
    size = len(coder.compress(content)) + len(coder.flush()) + _AT_THE_SEAM
    more = max(0, most_tokens - len(token_ids)) * _num_bytes(vocab_size)
    return min(len(content) / size, (len(content) + more) / (size + more * 9 / 8))


def _bytes(token_ids: Sequence[int], vocab_size: int) -> bytes:
    length = _num_bytes(vocab_size)
    return b"".join(token.to_bytes(length, "little") for token in token_ids)


def _num_bytes(vocab_size: int) -> int:
    return int(math.log2(vocab_size) / 8) + 1
