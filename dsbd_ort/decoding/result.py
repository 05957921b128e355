"""The results of a request: its iterations' outputs, its sequences and their statistics."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.beams import Agreement, Hypotheses, Hypothesis
from dsbd_ort.decoding.rule import Finished
from dsbd_ort.decoding.stats import DecodingStats, StatsRecorder
from dsbd_ort.decoding.top_tokens import PromptLogprobs, TokenLogprobs, TopTokens


@dataclass(frozen=True, kw_only=True)
class DecodedSequence:
    """One returned sequence.

    Attributes:
        token_ids: the new tokens, those included that end the sequence.
        token_logprobs: raw log-probability of every new token under the target.
        logprob: their sum.
        score: logprob / num_new_tokens ** length_penalty, the ranking.
        finish_reason: "eos", "stop" (a stop string) or "length".
        top_logprobs: the most probable tokens in the place of every new token, with
            ``top_logprobs`` in the request.
    """

    token_ids: list[int]
    token_logprobs: list[float]
    logprob: float
    score: float
    finish_reason: str
    top_logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class DecodeResult:
    """The sequences, best first, and the statistics of a request.

    distribution_bytes_peak: most bytes that the distributions of nodes took, of both engines.
    """

    sequences: list[DecodedSequence]
    stats: DecodingStats
    distribution_bytes_peak: int = 0
    prompt_logprobs: PromptLogprobs | None = None


class IterationOutput(ABC):
    """The live hypotheses after one iteration of the loop; read outputs in their order.

    agreed_tokens: new tokens, from the first on, that all live hypotheses share: they are final.
    """

    agreed_tokens: list[int]

    @abstractmethod
    def stats(self) -> DecodingStats:
        """Return the statistics up to this iteration, before the next one."""

    @abstractmethod
    def agreed_logprobs(self, start: int) -> list[float]:
        """Return the raw log-probabilities of the agreed tokens from number ``start`` on."""

    @abstractmethod
    def agreed_top_logprobs(self, start: int) -> list[TokenLogprobs] | None:
        """Return the most probable tokens in the places of the agreed ones from ``start`` on."""


@dataclass(eq=False)
class LiveHypotheses(IterationOutput):
    """The output of an iteration of the numpy loop."""

    all_hypotheses: Hypotheses
    live: NDArray[np.int64]
    agreement: Agreement
    recorder: StatsRecorder
    tops: TopTokens | None

    @property
    def hypotheses(self) -> list[Hypothesis]:
        return [Hypothesis(self.all_hypotheses, entry) for entry in self.live.tolist()]

    @cached_property
    def agreed_tokens(self) -> list[int]:  # type: ignore[override]  # computed once it is read
        self.agreement.update(self.live)
        return self.agreement.tokens.copy()

    def stats(self) -> DecodingStats:
        return self.recorder.stats(len(self.agreed_tokens))

    def agreed_logprobs(self, start: int) -> list[float]:
        entries = self.agreement.entries[start : len(self.agreed_tokens)]
        logprobs: list[float] = self.all_hypotheses.token_logprobs[entries].tolist()
        return logprobs

    def agreed_top_logprobs(self, start: int) -> list[TokenLogprobs] | None:
        entries = self.agreement.entries[start : len(self.agreed_tokens)]
        return None if self.tops is None else self.tops.of(np.array(entries, dtype=np.int64))


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class WithResult(Generic[_Item, _Result]):
    """Iterates over a generator; afterwards ``result`` is its return value."""

    result: _Result

    def __init__(self, generator: Generator[_Item, None, _Result]) -> None:
        self._generator = generator

    def __iter__(self) -> Iterator[_Item]:
        self.result = yield from self._generator


def result_of(generator: Generator[object, None, _Result]) -> _Result:
    """Run a generator to its end and return its return value."""
    items = WithResult(generator)
    for _ in items:
        pass
    return items.result


def decoded_sequences(
    finished: Finished,
    hypotheses: Hypotheses,
    finish_reason: Callable[[list[int]], str],
    tops: TopTokens | None = None,
) -> list[DecodedSequence]:
    """Return final hypotheses as sequences; ``finish_reason`` is that of a request."""
    sequences = []
    logprobs = hypotheses.logprobs[finished.hypotheses].tolist()
    of_paths = hypotheses.paths(finished.hypotheses), logprobs, finished.scores.tolist()
    for path, logprob, score in zip(*of_paths, strict=True):
        token_ids = hypotheses.tokens[path].tolist()
        token_logprobs = hypotheses.token_logprobs[path].tolist()
        top_logprobs = None if tops is None else tops.of(path)
        reason = finish_reason(token_ids)
        sequences.append(
            DecodedSequence(
                token_ids=token_ids,
                token_logprobs=token_logprobs,
                logprob=logprob,
                score=score,
                finish_reason=reason,
                top_logprobs=top_logprobs,
            )
        )
    return sequences
