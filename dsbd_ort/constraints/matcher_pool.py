"""Grammar matchers that walk over the forest of a request: masks at any node, flat in its depth.

A matcher of llguidance holds its whole path, so a copy for each node would cost more with every
token (0.1 ms and 260 kB each behind 2,048 tokens). Going back and consuming tokens costs
microseconds wherever the matcher stands. So a request has a few matchers, and the one that stands
nearest to a node walks there: back to their common ancestor, then forward.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.constraints.position import Position
from dsbd_ort.decoding.errors import ConstraintError

if TYPE_CHECKING:
    import llguidance

MOST_MATCHERS = 64
MOST_STEPS = 32
"""Tokens to walk that cost about as much as a copy of a matcher does behind 1,000."""


class TextMasks:
    """Writes the masks of matchers, in parallel: the text tokens of a model that may follow."""

    def __init__(
        self, executor: llguidance.LLExecutor, num_words: int, text_bits: NDArray[np.int32]
    ) -> None:
        """Take the threads and the sizes.

        Args:
            executor: the threads.
            num_words: words of 32 tokens that a matcher writes.
            text_bits: (words,) int32. The model's tokens without those that end a sequence; no
                more than ``num_words``.
        """
        self._executor = executor
        self._num_words = num_words
        self._text_bits = text_bits

    def of(self, matchers: Sequence[llguidance.LLMatcher]) -> NDArray[np.int32]:
        """Return the masks of different matchers, (n, words): token t is bit t % 32 of t // 32."""
        bits = np.zeros((len(matchers), self._num_words), dtype=np.int32)
        if len(matchers) == 1:  # the threads would cost more than it does
            matchers[0].unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        else:
            rows = [(matcher, row) for row, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(
                rows, bits.ctypes.data, bits.strides[0], len(bits)
            )
        return bits[:, : len(self._text_bits)] & self._text_bits


@dataclass(slots=True, eq=False)
class _Walker:
    """A matcher and the positions that it has passed, the beginning left out."""

    matcher: llguidance.LLMatcher
    path: list[Position]

    def has_passed(self, position: Position) -> bool:
        depth = position.depth
        return depth == 0 or (len(self.path) >= depth and self.path[depth - 1] is position)

    def copy(self) -> _Walker:
        return _Walker(self.matcher.deep_copy(), self.path.copy())

    def walk_to(self, ancestor: Position, tail: Sequence[Position]) -> int:
        """Go back to a position that it has passed, then along ``tail``; return the steps done."""
        if steps_back := len(self.path) - ancestor.depth:
            self.matcher.rollback(steps_back)
            del self.path[ancestor.depth :]
        if not tail:
            return 0
        num_done = self.matcher.try_consume_tokens([position.token for position in tail])
        self.path.extend(tail[:num_done])
        return num_done


class MatcherPool:
    """Matchers of one request. Safe to use from several threads."""

    def __init__(self, name: str, matcher: llguidance.LLMatcher, masks: TextMasks) -> None:
        """Begin with one matcher, at the beginning."""
        self._name = name
        self._masks = masks
        self._walkers = [_Walker(matcher, [])]  # the least recently used first
        self._lock = threading.Lock()

    def look_up(self, positions: Sequence[Position]) -> list[tuple[NDArray[np.int32], bool]]:
        """Return the mask of each position, and whether the text may end there.

        As many matchers as possible compute at a time.
        """
        found: dict[int, tuple[NDArray[np.int32], bool]] = {}
        with self._lock:
            while len(found) < len(positions):
                pending = [index for index in range(len(positions)) if index not in found]
                placed = self._place(positions, pending)
                masks = self._masks.of([walker.matcher for walker in placed.values()])
                for (index, walker), bits in zip(placed.items(), masks, strict=True):
                    self._check(walker)
                    # a view would keep the masks of all the others
                    found[index] = bits.copy(), walker.matcher.is_accepting()
        return [found[index] for index in range(len(positions))]

    def _place(self, positions: Sequence[Position], pending: Sequence[int]) -> dict[int, _Walker]:
        """Send a matcher to each pending position, as far as there are; return them by index."""
        placed: dict[int, _Walker] = {}
        for index in pending:
            busy = set(map(id, placed.values()))
            free = [walker for walker in self._walkers if id(walker) not in busy]
            walker = self._send(
                positions[index], free, limit=min(2 * len(positions), MOST_MATCHERS)
            )
            if walker is not None:
                placed[index] = walker
        return placed

    def _send(self, position: Position, free: list[_Walker], *, limit: int) -> _Walker | None:
        """Send the nearest free matcher, or a copy of the nearest of all if that is far nearer.

        None: no matcher is free, and there are as many as there may be.
        """
        nearest, ancestor = _nearest(self._walkers, position)
        walker, origin = _nearest(free, position) if free else (None, position)
        if walker is None or ancestor.depth - origin.depth > MOST_STEPS:
            if len(self._walkers) >= limit:
                if walker is None:
                    return None
                self._walkers.remove(free[0])  # the least recently used
            walker, origin = nearest.copy(), ancestor
        else:
            self._walkers.remove(walker)
        self._walkers.append(walker)
        tail = position.tail(origin.depth)
        num_done = walker.walk_to(origin, tail)
        if num_done < len(tail):
            self._check(walker)
            raise ConstraintError(
                f"{self._name} does not allow token {tail[num_done].token} after "
                f"{origin.depth + num_done} tokens; a path advances by the tokens allowed there"
            )
        return walker

    def _check(self, walker: _Walker) -> None:
        """Raise for a matcher that has failed, by the limits of the library, and drop it."""
        if walker.matcher.is_error():
            self._walkers = [other for other in self._walkers if other is not walker]
            raise grammar_error(self._name, walker.matcher)


def grammar_error(name: str, matcher: llguidance.LLMatcher) -> ConstraintError:
    """Return the error of a constraint whose matcher has failed, with the library's message."""
    message = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    return ConstraintError(f"{name} is no grammar that can be followed: {message}")


def _nearest(walkers: Sequence[_Walker], position: Position) -> tuple[_Walker, Position]:
    """Return the matcher with the deepest position that is also on this path, and that position."""
    ancestor: Position | None = position
    while ancestor is not None:
        for walker in reversed(walkers):
            if walker.has_passed(ancestor):
                return walker, ancestor
        ancestor = ancestor.parent
    raise AssertionError("every matcher has passed the beginning")
