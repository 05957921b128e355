"""The n-gram drafter: what followed the last tokens of a path before (docs/algorithm.md 3.9).

Contexts of several lengths are looked up, the longest first; each gives its share of the
probability by how often it was seen, and leaves the rest to shorter ones (interpolated back-off,
after Witten and Bell 1991). Tokens that no context lists are never proposed. A text that the output
may repeat as a whole comes first: there the place of a path decides (``prediction.py``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.rows import NO_INTS
from dsbd_ort.decoding.drafting.prediction import Place, Prediction
from dsbd_ort.decoding.logits_processing.path_states import Nodes, Tokens

_DOUBTS = {8: 0.05, 5: 0.15, 3: 0.5, 2: 1.0, 1: 3.0}
"""By length of a context, longest first: of c tokens seen after it, d of them distinct, the share
c / (c + doubt * d) of the probability is theirs."""
_LONGEST = max(_DOUBTS)
_LONG_MATCH = 5
"""Tokens of a context from which on it is used before a draft model."""
_MOST_LISTED = 8
_ENOUGH = 0.95


Following = int | dict[int, int]
"""The tokens seen after a context and how often; a plain token was the only one, seen once."""


class NGramCounts:
    """Tokens that followed the contexts of some text, by hash: a clash only misleads."""

    def __init__(self) -> None:
        self.following: dict[int, Following] = {}
        self.num_tokens = 0

    def add(self, context: tuple[int, ...], token: int) -> None:
        """Count a token after its context, of which only the last tokens matter."""
        self.num_tokens += 1
        following = self.following
        for length in _DOUBTS:
            if length > len(context):
                continue
            key = hash(context[-length:])
            followers = following.get(key)
            if followers is None:
                following[key] = token
            elif isinstance(followers, int):
                following[key] = {followers: 2} if followers == token else {followers: 1, token: 1}
            else:
                followers[token] = followers.get(token, 0) + 1

    def add_text(self, token_ids: Sequence[int]) -> None:
        """Count the tokens of a text, each after those before it."""
        tokens = tuple(map(int, token_ids))
        for end in range(1, len(tokens)):
            self.add(tokens[max(0, end - _LONGEST) : end], tokens[end])


class NGramPool:
    """The texts of earlier requests, at most ``max_tokens``: the older half goes at once."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._most_of_half = max_tokens // 2
        self._halves = [NGramCounts(), NGramCounts()]  # the older one first

    @property
    def num_tokens(self) -> int:
        return sum(half.num_tokens for half in self._halves)

    @property
    def counts(self) -> list[NGramCounts]:
        """The tables to look up, latest first."""
        return self._halves[::-1]

    def add_text(self, token_ids: Sequence[int]) -> None:
        """Keep a text, or as much of its end as a half holds."""
        if self._halves[-1].num_tokens + len(token_ids) > self._most_of_half:
            self._halves = [self._halves[-1], NGramCounts()]
        self._halves[-1].add_text(token_ids[-self._most_of_half :] if self._most_of_half else ())


class NGramPaths:
    """Last tokens of every node's path, and its place; kept in step with the forest, PathStates."""

    def __init__(self, prompt_ids: Sequence[int], prediction: Prediction) -> None:
        self._tails = [tuple(map(int, prompt_ids[-_LONGEST - 1 :]))]
        self._prediction = prediction
        self._places = [Place()]

    def tails(self, nodes: Nodes) -> list[tuple[int, ...]]:
        return [self._tails[node] for node in nodes.tolist()]

    def places(self, nodes: Nodes) -> list[Place]:
        return [self._places[node] for node in nodes.tolist()]

    def add(self, parents: Nodes, followers: Tokens) -> None:
        """See PathStates.add; no path ends by it."""
        for parent, token in zip(parents.tolist(), followers.tolist(), strict=True):
            tail = (*self._tails[parent][-_LONGEST:], token)
            self._tails.append(tail)
            self._places.append(self._prediction.after(self._places[parent], tail))

    def would_end(self, parents: Nodes, tokens: Tokens) -> None:
        """See PathStates.would_end."""

    def prune(self, kept: Nodes, is_absorbing: NDArray[np.int64]) -> None:
        self._tails, self._places = self.tails(kept), self.places(kept)


@dataclass(eq=False, slots=True)
class Proposals:
    """Tokens that may follow some paths; all but ``unlisted`` have one shape, (n,)."""

    paths: NDArray[np.int64]  # the index of each candidate's path, increasing
    tokens: Tokens
    log_probs: NDArray[np.float64]
    unlisted: NDArray[np.float64]  # (num_paths,). Probability of all other tokens together


class NGramDrafter:
    """Next-token distributions by what followed before: in the prompt, the output and a pool."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        pool: NGramPool | None,
        temperature: float,
        *,
        only_long_matches: bool,
        copied_ids: Sequence[int] | Callable[[], Sequence[int]] = (),
        num_beams: int = 1,
    ) -> None:
        """Count the prompt; ``temperature`` sharpens the distribution as it does a model's.

        only_long_matches: propose nothing after other paths, which a model drafts. copied_ids:
            tokens that the output may repeat from the beginning on, as a source or a prediction: if
            a model drafts too, these alone. Those that a function returns, none until they are
            known, follow the prompt. num_beams: of the request.
        """
        self._late_ids = copied_ids if callable(copied_ids) else None
        self._prediction = Prediction(() if callable(copied_ids) else copied_ids)
        self.paths = NGramPaths(prompt_ids, self._prediction)
        self._own = NGramCounts()
        self._prompt_end = prompt_ids[-_LONGEST:]
        if copied_ids and not callable(copied_ids):
            self._own.add_text([*prompt_ids[:1], *copied_ids])
        self._own.add_text(prompt_ids)
        self._pool = pool
        self._exponent = 1.0 / max(temperature, 0.1)
        self._only_long_matches, self._num_beams = only_long_matches, num_beams

    def learn(self, nodes: Nodes) -> None:
        """Count the last token of these paths, each a committed one and for the first time."""
        for tail in self.paths.tails(nodes):
            self._own.add(tail[:-1], tail[-1])
        self._prediction.learn(self.paths.places(nodes))

    def proposals(self, nodes: Nodes) -> Proposals:
        """Return what may follow the paths of nodes."""
        if self._late_ids is not None and (copied_ids := self._late_ids()):
            self._own.add_text([*self._prompt_end, *copied_ids])
            self._late_ids = None
        tables = [self._own, *(self._pool.counts if self._pool else ())]
        paths, tokens, log_probs, unlisted = list[int](), list[int](), list[float](), list[float]()
        places = self.paths.places(nodes)
        for path, tail in enumerate(self.paths.tails(nodes)):
            listed, left = self._following(tail[-_LONGEST:], places[path], tables)
            paths += [path] * len(listed)
            tokens += listed
            log_probs += listed.values()
            unlisted.append(left)
        if not tokens:
            return Proposals(NO_INTS, NO_INTS, np.zeros(0), np.array(unlisted))
        return Proposals(*map(np.array, (paths, tokens, log_probs, unlisted)))

    def _following(
        self, tail: tuple[int, ...], place: Place, tables: list[NGramCounts]
    ) -> tuple[dict[int, float], float]:
        """Return log-probabilities of the tokens that may follow, and the probability of others."""
        shares, left = self._shares(tail, place, tables)
        if len(shares) > _MOST_LISTED:
            best = sorted(shares.items(), key=lambda item: -item[1])
            left += sum(share for _, share in best[_MOST_LISTED:])
            shares = dict(best[:_MOST_LISTED])
        powers = {token: share**self._exponent for token, share in shares.items()}
        rest = left**self._exponent
        total = sum(powers.values()) + rest
        return {token: math.log(power / total) for token, power in powers.items()}, rest / total

    def _shares(
        self, tail: tuple[int, ...], place: Place, tables: list[NGramCounts]
    ) -> tuple[dict[int, float], float]:
        """Return the probabilities of all tokens seen after a context, and that of the others."""
        shares = self._prediction.shares(place)
        if self._only_long_matches and self._prediction.token_ids:
            shares = shares if self._prediction.replaces_model(place, self._num_beams) else {}
            return shares, 1.0 - sum(shares.values())
        left = 1.0 - sum(shares.values())
        for length, doubt in _DOUBTS.items():
            if left < 1.0 - _ENOUGH:
                break
            if length > len(tail):
                continue
            if self._only_long_matches and length < _LONG_MATCH and not shares:
                break
            key = hash(tail[-length:])
            for table in tables:
                if (following := table.following.get(key)) is None:
                    continue
                counts = {following: 1} if isinstance(following, int) else following
                total = sum(counts.values())
                share = left * total / (total + doubt * len(counts))
                left -= share
                for token, count in counts.items():
                    shares[token] = shares.get(token, 0.0) + share * count / total
        return shares, left
