"""The most probable tokens after every committed path, and the log-probabilities of a prompt.

Both are raw, before temperature and the other warpings, over the whole vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.logits import Logits
from dsbd_forward.rows import largest_logits
from dsbd_forward.spec import EngineSpec
from dsbd_ort.decoding.beams import Hypotheses
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.distribution import larger
from dsbd_ort.decoding.drafting.draft import Iteration
from dsbd_ort.decoding.errors import ConfigError, DecodingError
from dsbd_ort.decoding.forest import Forest

SCORED_CHUNK = 64
"""Prompt rows per call if each has logits: bounds these at SCORED_CHUNK x vocabulary."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

TokenLogprobs = list[tuple[int, float]]
"""Token ids and raw log-probabilities at one position, the most probable first."""


@dataclass(frozen=True)
class PromptLogprobs:
    """The target's log-probabilities of a prompt's own tokens."""

    token_logprobs: list[float | None]  # after those before it; the first has none
    top_logprobs: list[TokenLogprobs | None] | None  # None without ``top_logprobs``


class TopTokens:
    """The most probable tokens after the nodes of a forest, kept for those that are committed.

    By slot (see ForestRunner) as long as a node lives; by hypothesis once its node was a beam. An
    Observer of the iterations.
    """

    def __init__(self, number: int, forest: Forest, hypotheses: Hypotheses) -> None:
        """Keep ``number`` tokens a position for the paths of ``hypotheses``."""
        self.number, self._forest, self._hypotheses = number, forest, hypotheses
        self._tokens = np.zeros((64, number), dtype=np.int64)  # (slot capacity, number)
        self._logprobs = np.zeros((64, number))
        self._num_slots = 1
        self._kept: dict[int, tuple[list[int], list[float]]] = {}  # by hypothesis

    def append(self, logits: Logits) -> None:
        """Take the logits of nodes whose slots are the next ones."""
        tokens, logprobs = top_logprobs_of(logits, self.number)
        first, self._num_slots = self._num_slots, self._num_slots + len(tokens)
        if self._num_slots > len(self._tokens):
            self._tokens = larger(self._tokens, 2 * self._num_slots)
            self._logprobs = larger(self._logprobs, 2 * self._num_slots)
        self._tokens[first : self._num_slots] = tokens
        self._logprobs[first : self._num_slots] = logprobs

    def keep(self, slots: Ints) -> None:
        """Keep slot 0 and these, which become 1, 2, ...; drop all others."""
        self._num_slots = 1 + len(slots)
        self._tokens[1 : self._num_slots] = self._tokens[slots]
        self._logprobs[1 : self._num_slots] = self._logprobs[slots]

    def observe(self, iteration: Iteration) -> None:
        """Keep the tokens after all beams of an iteration for good."""
        slots, _ = self._forest.slots  # of the target
        for beams in (iteration.roots, *iteration.committed):
            of_beams = slots[beams.nodes].tolist()
            for entry, slot in zip(beams.hypotheses.tolist(), of_beams, strict=True):
                if slot > 0 and entry not in self._kept:
                    self._kept[entry] = self._tokens[slot].tolist(), self._logprobs[slot].tolist()

    def of(self, entries: Ints) -> list[TokenLogprobs]:
        """Return the most probable tokens in the place of each hypothesis' last token."""
        parents = self._hypotheses.parents[entries].tolist()
        tokens = self._hypotheses.tokens[entries].tolist()
        logprobs = self._hypotheses.token_logprobs[entries].tolist()
        return [
            _with_own(*self._kept[parent], token, logprob)
            for parent, token, logprob in zip(parents, tokens, logprobs, strict=True)
        ]


def check_top_logprobs(target: EngineSpec, config: DecodingConfig) -> None:
    """Raise ConfigError for log-probabilities that an engine with a top-k head does not return."""
    num_top = target.head.num_top_logits
    if not num_top or target.head.keeps_full_logits:
        return
    returns = f"but the target's engine returns the {num_top} largest logits of a position"
    if config.top_logprobs > num_top:
        raise ConfigError(
            f"top_logprobs is {config.top_logprobs}, {returns} and keeps no others; use at most "
            f"{num_top}, or export again, where --logits topk keeps them all"
        )
    if config.prompt_logprobs:
        raise ConfigError(
            f"prompt_logprobs is True, {returns}, which may lack the prompt's own tokens; leave it "
            "out, or export again, where --logits topk keeps them all (or with --logits full)"
        )


def top_logprobs_of(logits: Logits, number: int) -> tuple[Ints, Floats]:
    """Return the most probable tokens of every row and their log-probabilities, (R, number) each.

    DecodingError: an engine with a top-k head returned fewer, and no others can be read.
    """
    normalizers = logits.log_normalizers
    tokens, scores = logits.most_probable(number)
    if tokens.shape[1] < number:  # as many as a top-k head has returned
        tokens, scores = largest_logits(_whole_rows(logits), number)
    return tokens, scores - normalizers


class PromptScorer:
    """Collects the log-probabilities of a prompt's tokens, call by call."""

    def __init__(self, prompt_ids: Sequence[int], num_top: int) -> None:
        """Take the whole prompt; ``num_top``: most probable tokens to keep at a position."""
        self._prompt_ids = np.array(prompt_ids, dtype=np.int64)
        self._num_top = num_top
        self._logprobs: list[float | None] = [None]
        self._tops: list[TokenLogprobs | None] = [None]

    def append(self, logits: Logits) -> None:
        """Take the logits after the next tokens of the prompt."""
        first = len(self._logprobs)
        following = self._prompt_ids[first : first + len(logits)]
        chosen = _whole_rows(logits)[np.arange(len(following)), following].astype(np.float64)
        logprobs = (chosen - logits.log_normalizers[: len(following), 0]).tolist()
        self._logprobs += logprobs
        if self._num_top:
            tops = zip(*top_logprobs_of(logits, self._num_top), strict=True)
            for (tokens, values), token, logprob in zip(tops, following, logprobs, strict=True):
                self._tops.append(_with_own(tokens.tolist(), values.tolist(), int(token), logprob))

    def result(self) -> PromptLogprobs:
        return PromptLogprobs(self._logprobs, self._tops if self._num_top else None)


def _whole_rows(logits: Logits) -> NDArray[np.float32]:
    """Return all logits of all rows, (R, vocab_size)."""
    if logits.whole is not None:
        return logits.whole
    num_rows, full = len(logits), logits.full
    if full is None:
        raise DecodingError(
            f"log-probabilities of {num_rows} rows are needed that the target's top-k head has "
            "left out, and it keeps no others; lower top_logprobs, or export the bundle again"
        )
    return full.read(np.arange(num_rows))


def _with_own(
    tokens: list[int], logprobs: list[float], chosen: int, logprob: float
) -> TokenLogprobs:
    """Return pairs in which token ``own`` has ``logprob`` to the last bit."""
    return [
        (token, logprob if token == chosen else value)
        for token, value in zip(tokens, logprobs, strict=True)
    ]
