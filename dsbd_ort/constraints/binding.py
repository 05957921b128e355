r"""Constraints of a bundle: read from plain data, and bound to its tokenizer and vocabulary.

Plain data comes from the command line, a JSONL line, HTTP or a C caller. One key names the kind;
other keys set the layout of JSON or how a trie ends:

    {"json_schema": {"type": "object"}, "flexible_whitespace": true}
    {"json_object": true}
    {"regex": "[0-9]{3}"}
    {"choice": ["yes", "no"]}
    {"grammar": "start: \"a\" | \"b\""}
    {"trie": "items.trie", "end": "eos"}

Every grammar may also have ``"canonical": true``.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsbd_ort.constraints.grammar import (
    Canonical,
    Choice,
    FunctionCalls,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    after_spaces,
)
from dsbd_ort.constraints.grammar_matching import GrammarTokenizer
from dsbd_ort.constraints.token_trie import TokenTrie
from dsbd_ort.decoding import DecodedSequence
from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.decoding.logits_processing.constraint import Constraint
from dsbd_ort.decoding.option_values import did_you_mean, shown

TrieOfName = Callable[[str], TokenTrie]

_LAYOUT: dict[str, type] = {
    "item_separator": str,
    "key_separator": str,
    "flexible_whitespace": bool,
}
_SPELLING: dict[str, type] = {"canonical": bool}
_END: dict[str, type] = {"end": str}
_OTHERS: dict[str, dict[str, type]] = {  # other keys of each kind, and their types
    "json_schema": _LAYOUT | _SPELLING,
    "json_object": _LAYOUT | _SPELLING,
    "regex": _SPELLING,
    "choice": _SPELLING,
    "grammar": _SPELLING,
    "trie": _END,
}
KINDS = tuple(_OTHERS)  # the kinds of constraints that plain data can name

_KIND_BY_CLASS = {
    JsonSchema: "json_schema",
    FunctionCalls: "json_schema",
    JsonObject: "json_object",
    Regex: "regex",
    Choice: "choice",
    Lark: "grammar",
    TokenTrie: "trie",
}
_JSON_NAMES = {str: "a text", bool: "true or false"}


def kind_of(constraint: object) -> str:
    """Return the kind of a constraint, as plain data and metrics name it."""
    of = constraint.grammar if isinstance(constraint, Canonical) else constraint
    return _KIND_BY_CLASS.get(type(of), "other")


def constraint_from_data(data: Mapping[str, Any], trie_of_name: TrieOfName) -> Any:
    """Return the constraint that plain data describes; the module's docstring has examples.

    ConstraintError: the data describes no constraint; the message begins with "constraint".
    """
    kind = _kind(data)
    value = data[kind]
    others = {name: other for name, other in data.items() if name != kind}
    _check_others(kind, others)
    is_canonical = others.pop("canonical", False)
    constraint = _constraint_of(kind, value, others, trie_of_name)
    return Canonical(constraint) if is_canonical else constraint


def _constraint_of(
    kind: str, value: Any, others: Mapping[str, Any], trie_of_name: TrieOfName
) -> Any:
    if kind == "json_schema":
        return JsonSchema(value, **others)
    if kind == "json_object":
        if value is not True:
            raise ConstraintError(
                f"constraint has json_object {shown(value)}; use true, or leave the constraint out"
            )
        return JsonObject(**others)
    if kind == "choice":
        if not isinstance(value, list | tuple):
            raise ConstraintError(f"constraint has choice {shown(value)}; expected a list of texts")
        return Choice(value)
    if not isinstance(value, str):
        raise ConstraintError(f"constraint has {kind} {shown(value)}; expected a text")
    if kind == "trie":
        trie = trie_of_name(value)
        end = others.get("end", trie.end)
        if end not in ("leaf", "eos"):
            raise ConstraintError(f"constraint has end {end!r}; a trie ends with 'leaf' or 'eos'")
        return trie if end == trie.end else trie.ending(end)
    return Regex(value) if kind == "regex" else Lark(value)


def with_constraint(options: Mapping[str, Any], trie_of_name: TrieOfName) -> dict[str, Any]:
    """Return the options of a request; a constraint given as plain data is parsed."""
    constraint = options.get("constraint")
    if not isinstance(constraint, Mapping):
        return dict(options)
    return {**options, "constraint": constraint_from_data(constraint, trie_of_name)}


def _kind(data: Mapping[str, Any]) -> str:
    given = [kind for kind in KINDS if kind in data]
    if len(given) > 1:
        raise ConstraintError(
            f"constraint has {' and '.join(given)}; give one of them: a request has one constraint"
        )
    if not given:
        name = next(iter(data), None)
        expected = f"; expected one of {', '.join(KINDS)}"
        close = did_you_mean(name, KINDS) if name is not None else ""
        raise ConstraintError(f"constraint has {shown(list(data))}{close or expected}")
    return given[0]


def _check_others(kind: str, others: Mapping[str, Any]) -> None:
    type_by_key = _OTHERS[kind]
    for name, value in others.items():
        if name not in type_by_key:
            raise ConstraintError(
                f"constraint has {shown(name)} with {kind}; expected one of "
                f"{', '.join(type_by_key)} there"
            )
        if not isinstance(value, type_by_key[name]):
            raise ConstraintError(
                f"constraint has {name} {shown(value)}; expected {_JSON_NAMES[type_by_key[name]]}"
            )


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
        """Try grammars in a separate process from now on, because they are untrusted.

        Reads the tokenizer now: later, this would stop all other threads for seconds.
        """
        with self._lock:
            if not self._is_guarded:
                self._is_guarded, self._tokenizer = True, None
        with contextlib.suppress(ConstraintError):  # raised again for each request with a grammar
            self.tokenizer.start()

    def close(self) -> None:
        """End the process that tries grammars, if any."""
        with self._lock:
            if self._tokenizer is not None:
                self._tokenizer.close()

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return with_constraint(options, self._tries)

    def bound(
        self,
        constraint: Any,
        eos_token_ids: Iterable[int] | None = None,
        num_dropped_spaces: int = 0,
    ) -> Constraint | None:
        """Return a grammar bound to the bundle's tokenizer; None if there is nothing to bind.

        eos_token_ids: end tokens of the request; None: those of the bundle.
        num_dropped_spaces: spaces dropped at the beginning of the text, see ``TextWindow``.
        ConstraintError: the constraint is invalid, or a trie has tokens that the target lacks, or
            end-of-sequence tokens.
        """
        if isinstance(constraint, TokenTrie):
            if constraint.highest_token >= self._vocab_size:
                raise ConstraintError(
                    f"{constraint.name} has the token id {constraint.highest_token}; expected 0 to "
                    f"{self._vocab_size - 1}, the target's vocabulary: build it with the bundle's "
                    "tokenizer"
                )
            constraint.check_ends(
                self._eos_token_ids if eos_token_ids is None else sorted(eos_token_ids)
            )
        if not hasattr(constraint, "bind"):
            return None
        return after_spaces(constraint, num_dropped_spaces).bind(self.tokenizer)

    @property
    def tokenizer(self) -> GrammarTokenizer:
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
    """Return a sequence's items, [] if it was cut off; None if no trie with items constrains it."""
    if not isinstance(constraint, TokenTrie) or not constraint.has_items:
        return None
    return [] if sequence.finish_reason == "length" else constraint.items_of(sequence.token_ids)


@dataclass
class _KeptTrie:
    lock: threading.Lock = field(default_factory=threading.Lock)
    trie: TokenTrie | None = None


class TrieFiles:
    """Cache of the last few tries read from files; a file is read again only if it has changed.

    Safe to use from several threads, which wait only for a file that they need themselves.
    """

    def __init__(self, read: Callable[[Path], TokenTrie] = TokenTrie.from_file) -> None:
        self._read = read
        self._lock = threading.Lock()  # guards _kept
        self._kept: OrderedDict[tuple[Any, ...], _KeptTrie] = OrderedDict()

    def __call__(self, path: str) -> TokenTrie:
        file = Path(path)
        try:
            info = file.stat()
            key = (file.absolute(), info.st_ino, info.st_mtime_ns, info.st_size)
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
