"""Grammars bound to a tokenizer: constraints with one immutable state per node.

llguidance compiles grammars and computes masks; it is imported when the first tokenizer is made.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsbd_errors import install_hint
from dsbd_ort.constraints import trial
from dsbd_ort.constraints.canonical_spelling import bits_of, spelling_of
from dsbd_ort.constraints.grammar_memory import MOST_BYTES, GrammarMemory, MemoryLimit
from dsbd_ort.constraints.matcher_pool import MatcherPool, TextMasks, grammar_error, not_followed
from dsbd_ort.constraints.position import Position, object_states
from dsbd_ort.constraints.trial_worker import STACK_BYTES, error_in_following
from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.decoding.logits_processing.constraint import Constraint, States, TokenMasks

if TYPE_CHECKING:
    import llguidance

_MOST_THREADS = 32
_STACK_SIZE = threading.Lock()  # the stack size is a setting of the whole process
T = TypeVar("T")

MOST_COMPILED = 64  # grammars that a tokenizer keeps compiled
MOST_GRAMMAR_BYTES = 8 << 20
"""A grammar that has grown by more than this is compiled again for its next request."""


class Grammar:
    """Specification of a grammar: hashable, because it is the key of the compiled grammar."""

    @property
    def name(self) -> str:
        """A short description for messages, such as "the regex '[0-9]+'"."""
        raise NotImplementedError

    def source(self, library: type[llguidance.LLMatcher]) -> str:
        """Return the grammar in the language of llguidance."""
        raise NotImplementedError

    def parts(self, library: type[llguidance.LLMatcher]) -> list[str]:
        """Return the parts of the grammar that are most likely to exceed a limit."""
        return []

    def bind(self, tokenizer: GrammarTokenizer) -> Constraint:
        """Return the constraint to this grammar; raise ConstraintError if it is invalid."""
        return tokenizer.constraint(self)


@contextlib.contextmanager
def _named(grammar: Grammar) -> Iterator[None]:
    try:
        yield
    except ConstraintError:
        raise
    except ValueError as error:  # a text that is not valid Unicode, for example
        raise ConstraintError(f"{grammar.name} cannot be compiled: {error}") from error


class GrammarTokenizer:
    """The tokenizer of grammars, with a cache of the grammars compiled for it.

    Construction takes about three seconds for a vocabulary of 150,000: make one per bundle.
    Safe to use from several threads.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_threads: int | None = None,
        is_guarded: bool = False,
    ) -> None:
        """Read the text of a tokenizer.json.

        vocab_size: tokens of the model, which may be more or fewer than the tokenizer has.
        eos_token_ids: tokens that no grammar ever allows: the decoder allows them itself.
        num_threads: threads that compute masks; None: one per core, at most 32.
        is_guarded: whether grammars are untrusted; ``GrammarTrial`` then tries each one first.
        """
        library = _library()
        tokenizer_json = _with_plain_spaces(tokenizer_json)
        self._tokenizer = _read(library, tokenizer_json, vocab_size, eos_token_ids)
        limits = trial.LIMITS if is_guarded else {"verbose_errors": False}
        self._limits = library.LLParserLimits(**limits)
        self._trial = None
        if is_guarded:
            size = self._tokenizer.vocab_size
            self._trial = trial.GrammarTrial(tokenizer_json, size, list(eos_token_ids) or None)
        num_words = _num_words(self._tokenizer.vocab_size)
        text_tokens = np.setdiff1d(np.arange(vocab_size), self._tokenizer.eos_tokens)
        text_bits = bits_of(text_tokens, _num_words(vocab_size))
        if num_threads is None:
            num_threads = min(os.cpu_count() or 1, _MOST_THREADS)
        executor = library.LLExecutor(num_threads) if num_threads > 1 else None
        self._masks = TextMasks(self._tokenizer, executor, num_words, text_bits)
        self.spelling = spelling_of(self._tokenizer)
        self._compiled: OrderedDict[Grammar, GrammarConstraint] = OrderedDict()
        self._lock = threading.RLock()
        self._memory_limit = MemoryLimit(MOST_BYTES if is_guarded else None, self._drop_one)

    def constraint(self, grammar: Grammar) -> GrammarConstraint:
        """Return the constraint to a grammar, cached or new; ConstraintError: it is invalid."""
        with self._lock:
            kept = self._compiled.get(grammar)
            if kept is not None and not kept.is_spent:
                self._compiled.move_to_end(grammar)
                return kept
        memory = GrammarMemory(grammar.name, self._memory_limit)
        tried = self._tried(grammar)  # before memory is counted: other threads allocate too
        with memory.compiling():
            made = GrammarConstraint(self._compile(grammar, *tried), self._masks, memory)
        with self._lock:
            self._compiled[grammar] = made
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        return made

    def _drop_one(self) -> bool:
        """Drop a grammar with ``is_over``, else the least recently used one without requests.

        Returns whether a grammar was dropped.
        """
        with self._lock:
            memories = {grammar: kept.memory for grammar, kept in self._compiled.items()}
            over = [grammar for grammar, memory in memories.items() if memory.is_over]
            unused = [grammar for grammar, memory in memories.items() if not memory.num_requests]
            for grammar in (*over, *unused)[:1]:
                del self._compiled[grammar]
            return bool(over or unused)

    def start(self) -> None:
        """Start the process that tries grammars, if they are untrusted."""
        if self._trial is not None:
            self._trial.start()

    def close(self) -> None:
        if self._trial is not None:
            self._trial.close()

    def _tried(self, grammar: Grammar) -> tuple[str, list[str]]:
        """Return the source of a grammar and its parts; if guarded, both are tried first."""
        matcher_class = _library().LLMatcher
        with _named(grammar):
            source = grammar.source(matcher_class)
            parts = grammar.parts(matcher_class)
            if self._trial is not None:
                self._trial.check(grammar.name, source, parts)
            return source, parts

    def _compile(self, grammar: Grammar, source: str, parts: list[str]) -> llguidance.LLMatcher:
        matcher_class = _library().LLMatcher
        with _named(grammar):
            matcher: llguidance.LLMatcher = on_deep_stack(
                lambda: matcher_class(self._tokenizer, source, log_level=0, limits=self._limits)
            )
        if matcher.is_error():
            raise grammar_error(grammar.name, matcher)
        if self._trial is None:
            library = _library()
            error = on_deep_stack(
                lambda: error_in_following(library, self._tokenizer, matcher, parts, self._limits)
            )
            if error is not None:
                raise not_followed(grammar.name, error)
        return matcher


def on_deep_stack(function: Callable[[], T]) -> T:
    """Call a function in a thread with a large stack, because grammars nest deep."""
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    with _STACK_SIZE:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=call)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ModuleNotFoundError as error:
        raise ConstraintError(
            f"grammars need a package that is not installed ({error.name}); "
            f"{install_hint('grammar')}"
        ) from error


def _read(
    library: Any, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]
) -> llguidance.LLTokenizer:
    """Return the tokenizer with the model's vocabulary size, or with its own if that is larger.

    If the model has no end-of-sequence token, the library uses one of the tokenizer's tokens.
    """
    eos = list(eos_token_ids) or None
    tokenizer: llguidance.LLTokenizer
    try:
        try:
            tokenizer = library.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos)
        except ValueError as error:
            if "vocab size too small" not in str(error):
                raise
            tokenizer = library.LLTokenizer(tokenizer_json, eos_token=eos)
    except ValueError as error:
        raise ConstraintError(
            f"grammars cannot use this tokenizer ({' '.join(str(error).split())}); they need the "
            "text of a tokenizer.json whose tokens are bytes (ByteLevel or ByteFallback)"
        ) from error
    return tokenizer


def _with_plain_spaces(tokenizer_json: str) -> str:
    """Return the tokenizer with ``Replace`` decoders for ``Metaspace``, which llguidance can read.

    Both decode alike except at the beginning of a text, see ``TextWindow.num_dropped_spaces``.
    """
    if '"Metaspace"' not in tokenizer_json:
        return tokenizer_json
    try:
        content = json.loads(tokenizer_json)
        steps = content["decoder"]["decoders"]
    except (
        ValueError,
        LookupError,
        TypeError,
    ):  # not a sequence, or not a tokenizer: the library reports it
        return tokenizer_json
    content["decoder"]["decoders"] = [
        {"type": "Replace", "pattern": {"String": step["replacement"]}, "content": " "}
        if step.get("type") == "Metaspace"
        else step
        for step in steps
    ]
    return json.dumps(content)


def _num_words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


@dataclass(slots=True, eq=False)
class GrammarState:
    """State of a path under a grammar.

    bits: (words,) int32. Allowed tokens; None until they are computed.
    is_accepting: whether the text may end here; undefined while ``bits`` is None.
    """

    pool: MatcherPool
    position: Position
    bits: NDArray[np.int32] | None = None
    is_accepting: bool = False


class GrammarConstraint:
    """Constraint to the texts of a grammar, in any tokenization.

    If only one text may follow, only the tokenizer's own tokenization of it is allowed.
    A complete text that cannot be continued ends without an end-of-sequence token. A complete text
    that can be continued ends with such a token.
    """

    def __init__(self, root: llguidance.LLMatcher, masks: TextMasks, memory: GrammarMemory) -> None:
        self._root = root
        self._masks = masks
        self.memory = memory
        first = root.deep_copy()  # the root computes no masks, see matcher_pool
        self._start_bits = masks.of([first])[0]
        if first.is_error():
            raise grammar_error(memory.name, first)
        self._accepts_at_start = first.is_accepting()

    @property
    def name(self) -> str:
        return self.memory.name

    @property
    def is_spent(self) -> bool:
        memory = self.memory
        return memory.has_failed or memory.is_over or memory.followed > MOST_GRAMMAR_BYTES

    def start(self, prompt_ids: Sequence[int]) -> States:
        self.memory.check()
        pool = MatcherPool(self._root, self._masks, self.memory)
        beginning = Position(None, -1)
        state = GrammarState(pool, beginning, self._start_bits, self._accepts_at_start)
        return object_states([state])

    def advance(self, states: States, tokens: NDArray[np.int64]) -> States:
        return object_states(
            [
                GrammarState(state.pool, Position(state.position, token))
                for state, token in zip(states, tokens.tolist(), strict=True)
            ]
        )

    def allowed(self, states: States) -> TokenMasks:
        self._fill(states)
        bits = np.empty((len(states), len(self._start_bits)), dtype=np.int32)
        for row, state in zip(bits, states, strict=True):
            row[:] = state.bits
        return TokenMasks(bits=bits)

    def accepts(self, states: States) -> NDArray[np.bool_]:
        self._fill(states)
        return np.array([state.is_accepting for state in states], dtype=np.bool_)

    def has_ended(self, states: States) -> NDArray[np.bool_]:
        self._fill(states)
        ended = [state.is_accepting and not state.bits.any() for state in states]
        return np.array(ended, dtype=np.bool_)

    def _fill(self, states: States) -> None:
        """Compute the missing masks of these states, those of one request together."""
        by_pool: dict[MatcherPool, list[GrammarState]] = {}
        for state in states:
            if state.bits is None:
                by_pool.setdefault(state.pool, []).append(state)
        for pool, lacking in by_pool.items():
            masks = pool.look_up([state.position for state in lacking])
            for state, (bits, is_accepting) in zip(lacking, masks, strict=True):
                state.bits, state.is_accepting = bits, is_accepting
