"""The values that an option takes: their type, their bounds, and their plain Python form.

A domain reads a value of any type: it returns a plain int, float, bool, str or tuple of these (a
numpy scalar becomes the Python number that it stands for), or raises a ConfigError that names the
option, the value and what was expected. A bool is not a number.
"""

import difflib
import itertools
import numbers
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dsbd_ort.decoding.errors import ConfigError

_MOST_SHOWN = 80  # characters of a value in a message
_MOST_SHOWN_BITS = 256  # of a number that is written out; Python refuses to write very long ones


class Domain(Protocol):
    """The values of one option; implemented by the classes that follow."""

    def read(self, name: str, value: object) -> Any:
        """Return ``value`` in its plain form; a ConfigError names the option if it is invalid."""


@dataclass(frozen=True)
class Whole:
    """A whole number from ``least`` to ``most``; ``off``: another one that is read as ``least``."""

    least: int
    most: int
    off: int | None = None

    def read(self, name: str, value: object) -> int:
        number = _whole_from(value)
        if number is None:
            raise ConfigError(f"{name} is {shown(value)}; expected a whole number")
        if number == self.off:
            return self.least
        if number < self.least:
            raise ConfigError(f"{name} is {shown(number)}; expected at least {self.least}")
        if number > self.most:
            raise ConfigError(f"{name} is {shown(number)}; expected at most {self.most}")
        return number


@dataclass(frozen=True)
class Wholes:
    """A whole number, or at most ``most_entries`` of them: an int, or a tuple of ints.

    is_ordered: whether their order matters. If not, a set may be given, which is sorted.
    noun: the name of an entry in messages.
    is_always_list: whether one number becomes a tuple of it.
    is_cut: whether further entries are left out, not refused.
    """

    entry: Whole
    most_entries: int
    is_ordered: bool
    noun: str = "whole number"
    is_always_list: bool = False
    is_cut: bool = False

    def read(self, name: str, value: object) -> int | tuple[int, ...]:
        if _whole_from(value) is not None:
            number = self.entry.read(name, value)
            return (number,) if self.is_always_list else number
        entries = entries_of(value, self.most_entries)
        if entries is None or (self.is_ordered and isinstance(value, Set)):
            raise ConfigError(f"{name} is {shown(value)}; expected a {self.noun} or a list of them")
        if len(entries) > self.most_entries:
            if not self.is_cut:
                raise ConfigError(
                    f"{name} is {shown(value)}; expected a list of at most {self.most_entries}"
                )
            entries = entries[: self.most_entries]
        whole = tuple(self._entry_of(name, entry) for entry in entries)
        return tuple(sorted(whole)) if isinstance(value, Set) else whole

    def _entry_of(self, name: str, entry: object) -> int:
        number = _whole_from(entry)
        if number is None or not self.entry.least <= number <= self.entry.most:
            raise ConfigError(
                f"{name} has {shown(entry)}; expected {self.noun}s from {self.entry.least} to "
                f"{self.entry.most}"
            )
        return number


@dataclass(frozen=True)
class Number:
    """A number from ``least`` to ``most``, as a float; ``is_open``: ``least`` is excluded."""

    least: float
    most: float
    is_open: bool = False
    least_positive: float = 0.0  # the smallest one above 0; 0 sets no such bound

    def read(self, name: str, value: object) -> float:
        if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
            raise ConfigError(f"{name} is {shown(value)}; expected a number")
        try:
            number = float(value)
        except OverflowError:
            number = float("nan")  # beyond every bound
        if not self.least <= number <= self.most or (self.is_open and number == self.least):
            raise ConfigError(f"{name} is {shown(value)}; expected {self._bounds()}")
        if 0.0 < number < self.least_positive:
            raise ConfigError(
                f"{name} is {shown(value)}; expected 0 or at least {self.least_positive}"
            )
        return number

    def _bounds(self) -> str:
        """Return the numbers as a message writes them: "0 to 1", "more than 0, up to 1"."""
        if self.least == -self.most == -sys.float_info.max:
            return "a finite number"
        if self.most == sys.float_info.max:
            return f"a finite number, {'more than ' * self.is_open}{self.least:g}" + (
                " or more" * (not self.is_open)
            )
        if self.is_open:
            return f"a number more than {self.least:g}, up to {self.most:g}"
        return f"a number from {self.least:g} to {self.most:g}"


@dataclass(frozen=True)
class OneOf:
    """One of a few names or bools; ``is_quoted``: whether a message quotes them."""

    choices: tuple[str | bool, ...]
    is_quoted: bool = True

    def read(self, name: str, value: object) -> str | bool:
        plain: object = bool(value) if isinstance(value, np.bool_) else value
        if isinstance(plain, str | bool):
            for choice in self.choices:  # 1 is no True
                if isinstance(plain, bool) is isinstance(choice, bool) and plain == choice:
                    return choice
        names = ", ".join(map(repr if self.is_quoted else str, self.choices))
        raise ConfigError(f"{name} is {shown(value)}; expected one of {names}")


@dataclass(frozen=True)
class WholeOrName:
    """A whole number, or one of a few names."""

    number: Whole
    names: tuple[str, ...]

    def read(self, name: str, value: object) -> int | str:
        if isinstance(value, str):
            for each in self.names:
                if value == each:
                    return each
        elif _whole_from(value) is not None:
            return self.number.read(name, value)
        names = ", ".join(map(repr, self.names))
        raise ConfigError(f"{name} is {shown(value)}; expected a whole number or one of {names}")


@dataclass(frozen=True)
class Text:
    """Any text."""

    def read(self, name: str, value: object) -> str:
        if not isinstance(value, str):
            raise ConfigError(f"{name} is {shown(value)}; expected a text")
        return str.__str__(value)


@dataclass(frozen=True)
class Texts:
    """A text that a finished text may contain, or at most ``most_texts``: a tuple of them."""

    most_texts: int
    most_characters: int

    def read(self, name: str, value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            return (self._text_of(name, value),)
        texts = None if isinstance(value, Set) else entries_of(value, self.most_texts)
        if texts is None:
            raise ConfigError(f"{name} is {shown(value)}; expected a text or a list of texts")
        if len(texts) > self.most_texts:
            raise ConfigError(
                f"{name} is {shown(value)}; expected a list of at most {self.most_texts}"
            )
        return tuple(self._text_of(name, text) for text in texts)

    def _text_of(self, name: str, text: object) -> str:
        if not isinstance(text, str):
            raise ConfigError(f"{name} has {shown(text)}; expected a text or a list of texts")
        if not text:
            raise ConfigError(f"{name} has an empty text, which every text contains; drop it")
        if len(text) > self.most_characters:
            raise ConfigError(
                f"{name} has a text of {len(text)} characters; expected at most "
                f"{self.most_characters}: shorten it"
            )
        if "\N{REPLACEMENT CHARACTER}" in text or any("\ud800" <= c <= "\udfff" for c in text):
            raise ConfigError(
                f"{name} has {shown(text)}, with U+FFFD or a lone surrogate, which no finished "
                "text holds; drop it"
            )
        return str.__str__(text)


@dataclass(frozen=True)
class TokenSequences:
    """A list of token sequences, or of single token ids: a tuple of tuples of ints."""

    most_sequences: int
    most_tokens: int

    def read(self, name: str, value: object) -> tuple[tuple[int, ...], ...]:
        entries = None if isinstance(value, Set) else entries_of(value, self.most_sequences)
        if entries is None or len(entries) > self.most_sequences:
            raise ConfigError(
                f"{name} is {shown(value)}; expected a list of at most {self.most_sequences} "
                "lists of token ids"
            )
        domain = Wholes(Whole(0, 2**31 - 1), self.most_tokens, is_ordered=True, noun="token id")
        read = [domain.read(name, entry) for entry in entries]
        if any(sequence == () for sequence in read):
            raise ConfigError(f"{name} has an empty list of token ids; drop it")
        return tuple(entry if isinstance(entry, tuple) else (entry,) for entry in read)


@dataclass(frozen=True)
class Biases:
    """A mapping of token ids, as numbers or as texts of numbers, to numbers: a tuple of pairs."""

    most_tokens: int
    bias: Number

    def read(self, name: str, value: object) -> tuple[tuple[int, float], ...]:
        pairs = value.items() if isinstance(value, Mapping) else value
        entries = entries_of(pairs, self.most_tokens)
        if entries is None or len(entries) > self.most_tokens:
            raise ConfigError(
                f"{name} is {shown(value)}; expected a mapping of at most {self.most_tokens} "
                "token ids to numbers"
            )
        return tuple(sorted(self._pair_of(name, entry) for entry in entries))

    def _pair_of(self, name: str, entry: object) -> tuple[int, float]:
        match entry:
            case (str(text), bias) if text.isdecimal():
                token = int(text)
            case (token, bias) if _whole_from(token) is not None:
                pass
            case _:
                raise ConfigError(f"{name} has {shown(entry)}; expected a token id and a number")
        return Whole(0, 2**31 - 1).read(name, token), self.bias.read(name, bias)


@dataclass(frozen=True)
class Objects:
    """An object that has certain methods, or with ``is_list`` a list of such: stored as it is."""

    methods: tuple[tuple[str, ...], ...]  # all of any one tuple
    expected: str
    is_list: bool = False

    def read(self, name: str, value: object) -> Any:
        entries = entries_of(value, _MOST_OBJECTS) if self.is_list else [value]
        for entry in entries if entries is not None else [value]:
            if entries is None or not any(
                all(callable(getattr(entry, method, None)) for method in methods)
                for methods in self.methods
            ):
                raise ConfigError(f"{name} is {shown(entry)}; expected {self.expected}")
        return tuple(entries or ()) if self.is_list else value


_MOST_OBJECTS = 64


def shown(value: object) -> str:
    """Return a value as a message writes it: at most 80 characters, on one line."""
    if isinstance(value, int) and value.bit_length() > _MOST_SHOWN_BITS:
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # nested too deep, or with such a number inside
        text = f"a {type(value).__name__}"
    if not text.isprintable():
        text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return "; did you mean 'top_k'?" for a name close to a known one, else nothing."""
    close = difflib.get_close_matches(name, known, 1) if isinstance(name, str) else []
    return f"; did you mean {close[0]!r}?" if close else ""


def _whole_from(value: object) -> int | None:
    """Return the int that a whole number of any type stands for, None for all else."""
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # such as an array of several
        return None


def entries_of(value: object, most: int) -> tuple[object, ...] | None:
    """Return the first ``most`` + 1 entries of a list, a set or an array; None for all else."""
    if isinstance(value, np.ndarray):
        return tuple(value[: most + 1]) if value.ndim == 1 else None
    if isinstance(value, str | bytes | bytearray | memoryview):
        return None
    if not isinstance(value, Sequence | Set):
        return None  # a generator is empty when it is read again
    entries: Iterable[object] = value
    return tuple(itertools.islice(entries, most + 1))
