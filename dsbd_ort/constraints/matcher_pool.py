"""Grammar matchers of a request: masks at any node of its forest.

A matcher of llguidance holds its whole path, so a copy costs more with every token (0.1 ms and
260 kB behind 2,048 of them), while going back and consuming tokens costs microseconds anywhere. But
masks of llguidance 1.9 are wrong after going back: the last one is cached by row and lexer state,
and both may be the same on another path. So a request has

* one *guide*, which computes no masks and walks to any node, back and forward,
* *runners*, which compute masks and only go forward. A node takes over the runner of its parent
  if that still stands there, and gets a copy of the guide else.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.constraints.position import Position
from dsbd_ort.decoding.errors import ConstraintError

if TYPE_CHECKING:
    import llguidance

MOST_RUNNERS = 64
_MOST_STEPS = 32  # that a runner goes: about what a copy costs behind 1,000 tokens


@dataclass(slots=True, eq=False)
class _Runner:
    """A matcher that goes forward, and where it stands."""

    matcher: llguidance.LLMatcher
    position: Position


class _Guide:
    """A matcher that goes anywhere, and the positions behind the beginning that it has passed."""

    def __init__(self, name: str, root: llguidance.LLMatcher) -> None:
        """Stand at the beginning.

        Args:
            name: what errors call the grammar.
            root: a matcher at the beginning, which has computed no mask. Not changed.
        """
        self._name = name
        self._root = root
        self._matcher = root.deep_copy()
        self._path: list[Position] = []

    def runner_at(self, position: Position) -> _Runner:
        """Go to a position; return a copy of the matcher there."""
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
    """Consume the tokens of ``tail``, those before the first that is not allowed.

    Raises:
        ConstraintError: one is not allowed; it is named.
    """
    num_done = matcher.try_consume_tokens([position.token for position in tail])
    if num_done == len(tail):
        return
    if not matcher.is_error():
        matcher.compute_bitmask()  # a lexer at its limit takes no token, and says so here alone
    if matcher.is_error():
        raise grammar_error(name, matcher)
    raise ConstraintError(
        f"{name} does not allow token {tail[num_done].token} after {tail[num_done].depth - 1} "
        "tokens; a path advances by the tokens allowed there"
    )


class TextMasks:
    """Writes the masks of matchers, in parallel: the text tokens of a model that may follow."""

    def __init__(
        self,
        tokenizer: llguidance.LLTokenizer,
        executor: llguidance.LLExecutor | None,
        num_words: int,
        text_bits: NDArray[np.int32],
    ) -> None:
        """Take the threads and the sizes.

        Args:
            tokenizer: that of the matchers.
            executor: the threads; None computes in the caller's, one matcher after the other.
            num_words: words of 32 tokens that a matcher writes.
            text_bits: (words,) int32. The model's tokens without those that end a sequence; no
                more than ``num_words``.
        """
        self._tokenizer = tokenizer
        self._executor = executor
        self._num_words = num_words
        self._text_bits = text_bits

    def of(self, matchers: Sequence[llguidance.LLMatcher]) -> NDArray[np.int32]:
        """Return the masks of different matchers, (n, words): token t is bit t % 32 of t // 32."""
        bits = np.zeros((len(matchers), self._num_words), dtype=np.int32)
        if self._executor is None or len(matchers) == 1:
            for row, matcher in zip(bits, matchers, strict=True):
                matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        else:
            rows = [(matcher, row) for row, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(
                rows, bits.ctypes.data, bits.strides[0], len(bits)
            )
        is_one_word = np.count_nonzero(bits, axis=1) == 1
        for matcher, row, is_likely in zip(matchers, bits, is_one_word, strict=True):
            if is_likely:
                self._spell_as_text(row, matcher)
        return bits[:, : len(self._text_bits)] & self._text_bits

    def _spell_as_text(self, bits: NDArray[np.int32], matcher: llguidance.LLMatcher) -> None:
        """Replace a special token that stands for text.

        A forced text is spelled by the tokenizer, which reads "<|im_end|>" as the special token of
        that name. The matcher does not take that for the text, which has to begin with "<".
        """
        tokens = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        token = int(tokens[0])
        if len(tokens) > 1 or not self._tokenizer.is_special_token(token):
            return
        text = matcher.compute_ff_bytes().decode(errors="ignore")
        if matcher.validate_tokens([token]) or not text:
            return
        before, name, _ = text.partition(self._tokenizer.decode_bytes([token]).decode())
        first = self._tokenizer.greedy_tokenize(before + name)[0]
        bits[:] = 0
        bits.view(np.uint32)[first // 32] = 1 << first % 32


class Growth:
    """Memory that a grammar takes: its matchers share a lexer, which grows while it is followed.

    The library does not say how much. What the process holds more is counted, which includes what
    other threads take in the meantime.

    Attributes:
        num_bytes: counted so far.
        has_failed: whether a matcher has. The lexer may be at a limit, and takes no token anymore.
    """

    def __init__(self, *, every: int = 1) -> None:
        """Begin with nothing; of so many times one is counted, for all of them."""
        self.num_bytes = 0
        self.has_failed = False
        self._every = every
        self._num_times = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is taken within."""
        is_counted = self._num_times % self._every == 0
        self._num_times += 1
        before = held_bytes() if is_counted else 0
        try:
            yield
        except ConstraintError:
            self.has_failed = True
            raise
        finally:
            if is_counted:
                self.num_bytes += self._every * max(0, held_bytes() - before)


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        ).split()
    )


@functools.cache
def _malloc_info() -> Callable[[], _MallocInfo] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # another C library
        return None
    function.restype = _MallocInfo
    return function


def held_bytes() -> int:
    """Return the memory that this process has allocated, 0 where the system does not say.

    What it has mapped says less: memory that one grammar has left is taken by the next.
    """
    malloc_info = _malloc_info()
    if malloc_info is None:
        return 0
    info = malloc_info()
    return int(info.uordblks) + int(info.hblkhd)


class MatcherPool:
    """Matchers of one request. Safe to use from several threads."""

    def __init__(
        self, name: str, root: llguidance.LLMatcher, masks: TextMasks, growth: Growth
    ) -> None:
        """Begin with the guide.

        Args:
            name: what errors call the grammar.
            root: a matcher at the beginning, which has computed no mask. Not changed.
            masks: writes the masks.
            growth: counts the memory of the grammar.
        """
        self._name = name
        self._guide = _Guide(name, root)
        self._masks = masks
        self._growth = growth
        self._runners: list[_Runner] = []  # the least recently used first
        self._lock = threading.Lock()

    def look_up(self, positions: Sequence[Position]) -> list[tuple[NDArray[np.int32], bool]]:
        """Return the mask of each position, and whether the text may end there."""
        found: list[tuple[NDArray[np.int32], bool]] = []
        with self._lock, self._growth.counted():
            for begin in range(0, len(positions), MOST_RUNNERS):
                found += self._computed(positions[begin : begin + MOST_RUNNERS])
        return found

    def _computed(self, positions: Sequence[Position]) -> list[tuple[NDArray[np.int32], bool]]:
        """Compute masks in parallel, each by a runner of its own."""
        runners = []
        idle, self._runners = self._runners, []
        for position in positions:
            runner = self._taken_over(position, idle)
            runners.append(runner or self._guide.runner_at(position))
        masks = self._masks.of([runner.matcher for runner in runners])
        for runner in runners:
            if runner.matcher.is_error():
                raise grammar_error(self._name, runner.matcher)
        most = min(2 * len(positions), MOST_RUNNERS)
        self._runners = [*idle, *runners][-most:]
        # a view would keep the masks of all the others
        return [
            (bits.copy(), runner.matcher.is_accepting())
            for bits, runner in zip(masks, runners, strict=True)
        ]

    def _taken_over(self, position: Position, idle: list[_Runner]) -> _Runner | None:
        """Return a runner that stood a few steps behind, gone to the position and no more idle."""
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
    """Return the error of a grammar for what the library says of it."""
    message = " ".join(reason.replace("<non-verbose/>", "").split())
    if message in ("NoExtension", "NoExtensionBias"):
        message = "it allows no text at all"
    if "Current row has" in message:
        message = (
            f"too much may follow at one place ({message}); make properties required, or fewer"
        )
    return ConstraintError(f"{name} is no grammar that can be followed: {message}")
