"""What comes of a request: the beams after every iteration, and the sequences in the end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dsbd_ort.decoding.beams import Hypothesis, common_tokens
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.rule import Finished
from dsbd_ort.decoding.stats import DecodingStats
from dsbd_ort.decoding.stopping import StopState, state_after


@dataclass(frozen=True, kw_only=True)
class DecodedSequence:
    """One returned sequence.

    Attributes:
        token_ids: the new tokens, those included that end the sequence.
        token_logprobs: raw log-probability of every new token under the target.
        logprob: their sum.
        score: logprob / num_new_tokens ** length_penalty, the ranking.
        finish_reason: "eos", "stop" (a stop string) or "length".
    """

    token_ids: list[int]
    token_logprobs: list[float]
    logprob: float
    score: float
    finish_reason: str


@dataclass(frozen=True)
class DecodeResult:
    """The sequences, best first, and the statistics of a request."""

    sequences: list[DecodedSequence]
    stats: DecodingStats


@dataclass(frozen=True)
class DecodeStep:
    """What is alive after one iteration of the loop."""

    hypotheses: list[Hypothesis]

    @cached_property
    def agreed_tokens(self) -> list[int]:
        """New tokens, from the first on, that all live hypotheses share: they are final."""
        return common_tokens(self.hypotheses)

    def agreed_logprobs(self, start: int) -> list[float]:
        """Return the raw log-probabilities of the agreed tokens from number ``start`` on."""
        stop = len(self.agreed_tokens)
        return [link.token_logprob for link in self.hypotheses[0].chain()[start:stop]]


def decoded_sequence(
    finished: Finished, config: DecodingConfig, stop: StopState | None
) -> DecodedSequence:
    """Return a final hypothesis as a sequence."""
    chain = finished.hypothesis.chain()
    token_ids = [link.token for link in chain]
    return DecodedSequence(
        token_ids=token_ids,
        token_logprobs=[link.token_logprob for link in chain],
        logprob=finished.hypothesis.logprob,
        score=finished.score,
        finish_reason=_finish_reason(token_ids, config, stop),
    )


def _finish_reason(token_ids: list[int], config: DecodingConfig, stop: StopState | None) -> str:
    if token_ids[-1] in config.eos_ids:
        return "eos"
    return "stop" if stop and state_after(stop, token_ids).has_ended else "length"
