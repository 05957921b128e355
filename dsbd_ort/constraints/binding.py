"""Constraints of a bundle: read from plain data, and bound to its tokenizer and vocabulary."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsbd_ort.constraints.grammar import after_spaces
from dsbd_ort.constraints.grammar_matching import GrammarTokenizer
from dsbd_ort.constraints.plain_data import with_constraint
from dsbd_ort.constraints.token_trie import TokenTrie
from dsbd_ort.decoding import DecodedSequence
from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.decoding.logits_processing.constraint import Constraint

_MOST_FILES = 8


class ConstraintBinding:
    """Binds constraints to the tokenizer of a bundle. Safe to use from several threads."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._is_guarded = False
        self._tokenizer: GrammarTokenizer | None = None
        self._lock = threading.Lock()
        self._tries = TrieFiles()

    def guard(self) -> None:
        """Try grammars in a separate process from now on, because they are untrusted."""
        with self._lock:
            if not self._is_guarded:
                self._is_guarded, self._tokenizer = True, None

    def close(self) -> None:
        """End the process that tries grammars, if any."""
        with self._lock:
            if self._tokenizer is not None:
                self._tokenizer.close()

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a request, a constraint that is plain data among them read."""
        return with_constraint(options, self._tries)

    def bound(self, constraint: Any, num_dropped_spaces: int = 0) -> Constraint | None:
        """Return a constraint that needs a tokenizer bound to the bundle's; None for another.

        num_dropped_spaces: at the beginning of the text, see ``TextWindow``.

        Raises:
            ConstraintError: it is invalid, or has tokens that the target lacks.
        """
        if isinstance(constraint, TokenTrie) and constraint.highest_token >= self._vocab_size:
            raise ConstraintError(
                f"{constraint.name} has the token id {constraint.highest_token}; expected 0 to "
                f"{self._vocab_size - 1}, the target's vocabulary: build it with the bundle's "
                "tokenizer"
            )
        if not hasattr(constraint, "bind"):
            return None
        return after_spaces(constraint, num_dropped_spaces).bind(self.tokenizer)

    @property
    def tokenizer(self) -> GrammarTokenizer:
        """The tokenizer of grammars, read once."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = GrammarTokenizer(
                    self._tokenizer_file.read_text("utf-8"),
                    vocab_size=self._vocab_size,
                    eos_token_ids=self._eos_token_ids,
                    is_guarded=self._is_guarded,
                )
            return self._tokenizer


def items_of(constraint: Any, sequence: DecodedSequence) -> list[Any] | None:
    """Return the items of a sequence, none if it was cut off; None without a trie with items."""
    if not isinstance(constraint, TokenTrie) or not constraint.has_items:
        return None
    return [] if sequence.finish_reason == "length" else constraint.items_of(sequence.token_ids)


@dataclass
class _KeptTrie:
    """The trie of a file, None until it is read, which holds the lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    trie: TokenTrie | None = None


class TrieFiles:
    """Tries read from files, the last few kept: each is read once while its file is the same.

    Safe to use from several threads: the first that needs a file reads it, the others wait for
    this trie only.
    """

    def __init__(self, read: Callable[[Path], TokenTrie] = TokenTrie.from_file) -> None:
        self._read = read
        self._lock = threading.Lock()  # of what follows
        self._kept: OrderedDict[tuple[Any, ...], _KeptTrie] = OrderedDict()

    def __call__(self, path: str) -> TokenTrie:
        file = Path(path)
        try:
            found = file.stat()
            key = (file.absolute(), found.st_ino, found.st_mtime_ns, found.st_size)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConstraintError(
                f"constraint has trie {path!r}, which cannot be read ({reason})"
            ) from error
        with self._lock:
            kept = self._kept.setdefault(key, _KeptTrie())
            self._kept.move_to_end(key)
        try:
            with kept.lock:
                if kept.trie is None:
                    kept.trie = self._read(file)
                trie = kept.trie
        except ConstraintError as error:
            with self._lock:
                self._kept.pop(key, None)
            raise ConstraintError(f"constraint has trie {path!r}: {error}") from error
        with self._lock:
            while len(self._kept) > _MOST_FILES:
                self._kept.popitem(last=False)
        return trie
