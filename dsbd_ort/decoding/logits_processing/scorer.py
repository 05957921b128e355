"""Scorers: log-scores of another source, added while the beams live (docs/algorithm.md 3.8).

A language model, a list of favoured words or a rule of the user's own adds a number to the score of
each next token. It depends on the path alone, so drafts change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.decoding.logits_processing.candidates import (
    Candidates,
    LogitsProcessor,
    Scores,
    given_scores,
)
from dsbd_ort.decoding.logits_processing.constraint import States
from dsbd_ort.decoding.logits_processing.path_states import Nodes, Tokens


class Scorer(Protocol):
    """Adds log-scores to the next tokens of paths. Immutable; it may serve many requests at once.

    Each node of the forest has a *state*, made once from its parent's; states of many nodes are one
    array. An object with ``bind(tokenizer, vocab_size, eos_token_ids)``, which returns a scorer,
    may be given instead; ``Pipeline`` binds it.

    Optional: a method ``highest(states)``, (n,): a score of each path that no token exceeds. If it
    is 0 or less, the tokens that a top-k head left out need not be read.
    """

    @property
    def name(self) -> str:
        """A short description for messages."""

    def start(self, prompt_ids: Sequence[int]) -> States:
        """Return the state of the empty continuation of a prompt, (1,)."""

    def advance(self, states: States, tokens: Tokens) -> States:
        """Return the states of paths with one more token each, (n,), none of which ends a text.

        states: (n,). Not changed. tokens: (n,) int64.
        """

    def scores(self, states: States, tokens: Tokens | None) -> Scores:
        """Return the numbers to add, natural logarithms: (n, m), finite or -inf.

        tokens: (n, m) int64 after each path, padded with -1, whose numbers are not read. None: all
        tokens by id, m = vocab_size. End-of-sequence tokens are among them.
        """


class ScorerStates(LogitsProcessor):
    """PathStates: the state of a scorer at every node; and the processor that adds its scores."""

    def __init__(self, scorer: Scorer, prompt_ids: Sequence[int], eos: Tokens) -> None:
        """Begin a request; ``eos``: (num_eos,) int64, after which a path keeps its state."""
        self._scorer, self._eos = scorer, eos
        self._states: States = scorer.start(prompt_ids)

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        added = np.asarray(
            self._scorer.scores(self._states[candidates.nodes], candidates.tokens), np.float64
        )
        is_whole = added.shape == scores.shape
        if is_whole and candidates.tokens is not None:
            added = np.where(candidates.tokens < 0, 0.0, added)
        checked = given_scores(added)
        if checked is None or not is_whole:
            raise ConstraintError(
                f"{self._scorer.name} returned scores of shape {added.shape}"
                f"{', with NaN or more than 1e30' * (checked is None)}; expected shape "
                f"{scores.shape}, finite or -inf"
            )
        return scores + checked

    def may_raise(self, candidates: Candidates) -> NDArray[np.bool_] | bool:
        if not hasattr(self._scorer, "highest"):
            return True
        return np.asarray(self._scorer.highest(self._states[candidates.nodes]) > 0.0)

    def add(self, parents: Nodes, tokens: Tokens) -> None:
        """See PathStates.add; no path ends by its score."""
        states = self._states[parents]
        goes_on = ~np.isin(tokens, self._eos)
        states[goes_on] = self._scorer.advance(states[goes_on], tokens[goes_on])
        self._states = np.concatenate([self._states, states])

    def would_end(self, parents: Nodes, tokens: Tokens) -> None:
        """See PathStates.would_end."""

    def prune(self, kept: Nodes, is_absorbing: NDArray[np.int64]) -> None:
        self._states = self._states[kept]


def added_score(scorer: Scorer, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
    """Return the sum of what a scorer adds to the tokens of one continuation of a prompt."""
    states, total = scorer.start(prompt_ids), 0.0
    for token in token_ids:
        total += float(scorer.scores(states, np.array([[token]]))[0, 0])
        states = scorer.advance(states, np.array([token]))
    return total
