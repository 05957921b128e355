"""What a pipeline gives back: sequences with their text, statistics, and the steps of a stream."""

from __future__ import annotations

from dataclasses import dataclass

from dsbd_ort.decoding import DecodedSequence, DecodingStats


@dataclass(frozen=True, kw_only=True)
class GeneratedSequence(DecodedSequence):
    """A decoded sequence and its text, special tokens left out, cut before a stop string."""

    text: str


@dataclass(frozen=True)
class GenerationResult:
    """The sequences, best first, and the statistics of a request."""

    sequences: list[GeneratedSequence]
    stats: DecodingStats


@dataclass(frozen=True)
class StreamStep:
    """New tokens that all live beams agree on, and text that is certain: never taken back.

    All may be empty; the text also waits for the rest of a character or of a stop string.

    Attributes:
        token_ids: the tokens.
        text: what became certain with them.
        token_logprobs: raw log-probability of every token under the target.
    """

    token_ids: list[int]
    text: str
    token_logprobs: list[float]
