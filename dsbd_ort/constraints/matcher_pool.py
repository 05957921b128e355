"""Grammar matchers of a request: masks at any node of its forest.

A matcher of llguidance stores its whole path, so a copy costs more with every token (0.1 ms and
260 kB after 2,048 tokens), while rolling back and consuming tokens takes microseconds anywhere. But
masks of llguidance 1.9 are wrong after a rollback: the last mask is cached by row and lexer state,
and both may be the same on another path. So a request has

* one *guide*, which computes no masks and moves to any node, back and forward,
* *runners*, which compute masks and only move forward. A node takes over the runner of its parent
  if it is still free, else it gets a copy of the guide.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.constraints.grammar_memory import GrammarMemory
from dsbd_ort.constraints.position import Position
from dsbd_ort.decoding.errors import ConstraintError

if TYPE_CHECKING:
    import llguidance

MOST_RUNNERS = 64
_MOST_STEPS = 32  # a runner moves; so many cost about as much as a copy after 1,000 tokens


@dataclass(slots=True, eq=False)
class _Runner:
    matcher: llguidance.LLMatcher
    position: Position


class _Guide:
    def __init__(self, name: str, root: llguidance.LLMatcher) -> None:
        """``root``: a matcher at the beginning, which has computed no mask. Not changed."""
        self._name = name
        self._root = root
        self._matcher = root.deep_copy()
        self._path: list[Position] = []

    def runner_at(self, position: Position) -> _Runner:
        """Move to a position; return a copy of the matcher there."""
        tail = []
        ancestor = position
        while not self._has_passed(ancestor) and ancestor.parent is not None:
            tail.append(ancestor)
            ancestor = ancestor.parent
        if num_back := len(self._path) - ancestor.depth:
            del self._path[ancestor.depth :]
            self._matcher.rollback(num_back)
        try:
            consume(self._name, self._matcher, tail[::-1])
        except ConstraintError:
            self._matcher, self._path = self._root.deep_copy(), []
            raise
        self._path.extend(tail[::-1])
        return _Runner(self._matcher.deep_copy(), position)

    def _has_passed(self, position: Position) -> bool:
        depth = position.depth
        return depth == 0 or (len(self._path) >= depth and self._path[depth - 1] is position)


def consume(name: str, matcher: llguidance.LLMatcher, tail: Sequence[Position]) -> None:
    """Consume the tokens of ``tail``; raise ConstraintError at a token that is not allowed."""
    num_done = matcher.try_consume_tokens([position.token for position in tail])
    if num_done == len(tail):
        return
    if not matcher.is_error():
        matcher.compute_bitmask()  # a lexer at its limit accepts no token, and reports it only here
    if matcher.is_error():
        raise grammar_error(name, matcher)
    raise ConstraintError(
        f"{name} does not allow token {tail[num_done].token} after {tail[num_done].depth - 1} "
        "tokens; a path advances by the tokens allowed there"
    )


@dataclass(frozen=True, slots=True, eq=False)
class TextMasks:
    """Computes the masks of matchers in parallel. A mask holds the text tokens that may follow.

    executor: None computes in the caller's thread, one matcher at a time.
    num_words: words of 32 tokens in the mask of a matcher.
    text_bits: (words,) int32. The model's tokens without those that end a sequence; ``words`` is at
        most ``num_words``.
    """

    tokenizer: llguidance.LLTokenizer
    executor: llguidance.LLExecutor | None
    num_words: int
    text_bits: NDArray[np.int32]

    def of(self, matchers: Sequence[llguidance.LLMatcher]) -> NDArray[np.int32]:
        """Return the masks of different matchers, (n, words); see ``bits_of`` for the layout."""
        bits = self.empty(len(matchers))
        self.write(matchers, bits)
        return self.of_text(bits)

    def empty(self, number: int) -> NDArray[np.int32]:
        """Return memory for masks, (number, num_words) int32 zeros."""
        return np.zeros((number, self.num_words), dtype=np.int32)

    def of_text(self, bits: NDArray[np.int32]) -> NDArray[np.int32]:
        return bits[:, : len(self.text_bits)] & self.text_bits

    def write(self, matchers: Sequence[llguidance.LLMatcher], bits: NDArray[np.int32]) -> None:
        """Write the masks of different matchers into a result of ``empty``."""
        if self.executor is None or len(matchers) == 1:
            for row, matcher in zip(bits, matchers, strict=True):
                matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        else:
            rows = [(matcher, row) for row, matcher in enumerate(matchers)]
            self.executor.unsafe_compute_mask_ptr(
                rows, bits.ctypes.data, bits.strides[0], len(bits)
            )
        is_one_word = np.count_nonzero(bits, axis=1) == 1
        for matcher, row, is_likely in zip(matchers, bits, is_one_word, strict=True):
            if is_likely:
                self._spell_as_text(row, matcher)

    def _spell_as_text(self, bits: NDArray[np.int32], matcher: llguidance.LLMatcher) -> None:
        """If the only allowed token is a special token, replace it by the first token of its text.

        The tokenizer spells a forced text, and reads "<|im_end|>" as the special token of that
        name. The matcher does not accept this token for the text, which must begin with "<".
        """
        (index,) = bits.nonzero()[0].tolist()  # the one word that is not 0
        word = int(bits.view(np.uint32)[index])
        token = 32 * index + word.bit_length() - 1
        if word.bit_count() > 1 or not self.tokenizer.is_special_token(token):
            return
        text = matcher.compute_ff_bytes().decode(errors="ignore")
        if matcher.validate_tokens([token]) or not text:
            return
        before, name, _ = text.partition(self.tokenizer.decode_bytes([token]).decode())
        first = self.tokenizer.greedy_tokenize(before + name)[0]
        bits[:] = 0
        bits.view(np.uint32)[first // 32] = 1 << first % 32


class MatcherPool:
    """Matchers of one request. Safe to use from several threads."""

    def __init__(self, root: llguidance.LLMatcher, masks: TextMasks, memory: GrammarMemory) -> None:
        self._name = memory.name
        self._memory = memory
        self._masks = masks
        self._lock = threading.Lock()
        self._runners: list[_Runner] = []  # the least recently used first
        self._guide: _Guide | None = None
        memory.add(num_requests=1)
        with memory.following():
            self._guide = _Guide(self._name, root)

    def __del__(self) -> None:
        with self._memory.counting():
            self._runners.clear()
            self._guide = None
        self._memory.add(num_requests=-1)

    def look_up(self, positions: Sequence[Position]) -> list[tuple[NDArray[np.int32], bool]]:
        """Return for each position its mask, (words,) int32, and whether the text may end there."""
        results: list[tuple[NDArray[np.int32], bool]] = []
        with self._lock:
            for begin in range(0, len(positions), MOST_RUNNERS):
                results += self._computed(positions[begin : begin + MOST_RUNNERS])
        return results

    def _computed(self, positions: Sequence[Position]) -> list[tuple[NDArray[np.int32], bool]]:
        bits = self._masks.empty(len(positions))
        with self._memory.following():
            are_accepting = self._written(positions, bits)
        masks = self._masks.of_text(bits)
        # a view would keep the masks of all positions in memory
        return [(mask.copy(), ends) for mask, ends in zip(masks, are_accepting, strict=True)]

    def _written(self, positions: Sequence[Position], bits: NDArray[np.int32]) -> list[bool]:
        runners = []
        idle, self._runners = self._runners, []
        guide = self._guide
        assert guide is not None  # until the pool is freed
        for position in positions:
            runner = self._taken_over(position, idle)
            runners.append(runner or guide.runner_at(position))
        self._masks.write([runner.matcher for runner in runners], bits)
        for runner in runners:
            if runner.matcher.is_error():
                raise grammar_error(self._name, runner.matcher)
        max_runners = min(2 * len(positions), MOST_RUNNERS)
        self._runners = [*idle, *runners][-max_runners:]
        return [runner.matcher.is_accepting() for runner in runners]

    def _taken_over(self, position: Position, idle: list[_Runner]) -> _Runner | None:
        """Move an idle runner that is at most ``_MOST_STEPS`` tokens before the position there.

        Returns the runner; None if there is no such runner.
        """
        tail: list[Position] = []
        ancestor: Position | None = position
        while ancestor is not None and len(tail) <= _MOST_STEPS:
            for runner in idle:
                if runner.position is ancestor:
                    idle.remove(runner)
                    consume(self._name, runner.matcher, tail[::-1])
                    runner.position = position
                    return runner
            tail.append(ancestor)
            ancestor = ancestor.parent
        return None


def grammar_error(name: str, matcher: llguidance.LLMatcher) -> ConstraintError:
    """Return the error of a constraint whose matcher has failed, with the library's message."""
    return not_followed(name, matcher.get_error())


def not_followed(name: str, reason: str) -> ConstraintError:
    """Return the ConstraintError of a grammar for a message of the library."""
    message = " ".join(reason.replace("<non-verbose/>", "").split())
    if message in ("NoExtension", "NoExtensionBias"):
        message = "it allows no text at all"
    if "coerce_one_of" in message:
        message = (
            "the alternatives of a oneOf may overlap, and exactly one cannot be required; use "
            "anyOf, or alternatives of different types"
        )
    if "Current row has" in message:
        message = (
            f"too much may follow at one place ({message}); make properties required, or fewer"
        )
    return ConstraintError(f"{name} is not a usable grammar: {message}")
