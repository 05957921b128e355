"""N-gram language models of words, read from files: ARPA here, KenLM's format by ``kenlm``."""

from __future__ import annotations

import gzip
import importlib
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from dsbd_errors.text_files import check_utf_8, opened_text
from dsbd_runtime.errors import InputError

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
_ARPA, _GZIP = b"\\data\\", b"\x1f\x8b"
_HEAD = 2**14  # first bytes of a file, in which comments may precede ``_ARPA``
_COUNT = re.compile(r"ngram\s+(\d{1,9})\s*=\s*(\d{1,15})", re.ASCII)
_LARGEST = 1e6  # largest number: sums of them, times any weight, stay finite
_NONE = -100.0  # log10 of a word that the model lacks, if it has no <unk>


class NGrams(Protocol):
    """A language model of words. A history is opaque and immutable."""

    def __contains__(self, word: str) -> bool: ...

    def history(self, *, begins: bool) -> Any:
        """Return the empty history; ``begins``: the history at the beginning of a sentence."""

    def score(self, history: Any, word: str) -> tuple[float, Any]:
        """Return log10 of the probability of a word after a history, and the history after it."""


class ArpaModel:
    """N-grams of an ARPA file, in memory, with about 300 bytes for each n-gram."""

    def __init__(self, lines: Iterator[str]) -> None:
        """Read the lines of an ARPA file; ValueError: they are invalid."""
        self._words: dict[str, int] = {}
        self._ngrams: dict[tuple[int, ...], tuple[float, float]] = {}
        declared: dict[int, int] = {}  # n-grams by their order
        order = 0
        for text in map(str.strip, lines):
            if text == "\\end\\":
                break
            if text == "\\data\\":
                declared.clear()  # counts before this line were comments
            elif text.startswith("\\") and text.endswith("-grams:"):
                order += 1
                if text != f"\\{order}-grams:":
                    raise ValueError(f"the line {text[:80]} follows; expected \\{order}-grams:")
            elif order and text:
                self._add(text, order)
            elif count := _COUNT.fullmatch(text):
                declared[int(count[1])] = int(count[2])
        else:
            raise ValueError("it has no line \\end\\")
        for _ in lines:  # reads on to the checksum of a compressed file
            pass
        self._check(declared)
        self._most_history = order - 1

    def _add(self, line: str, order: int) -> None:
        log_prob, *words = line.split()
        backoff = words.pop() if len(words) == order + 1 else "0"
        if len(words) != order:
            raise ValueError(f"the {order}-gram {line[:80]!r} has {len(words)} words")
        if order == 1:
            self._words.setdefault(words[0], len(self._words))
        try:
            key = tuple(self._words[word] for word in words)
        except KeyError as error:
            raise ValueError(f"the word {error} of {line[:80]!r} is no 1-gram") from error
        if key in self._ngrams:
            raise ValueError(f"the {order}-gram of {line[:80]!r} is there twice")
        self._ngrams[key] = (
            _number(line, "log10", log_prob, upper=0.0),
            _number(line, "backoff", backoff, upper=_LARGEST),
        )

    def _check(self, declared: Mapping[int, int]) -> None:
        """Raise ValueError if the counts differ from those of the head, or </s> is missing."""
        counts = Counter(map(len, self._ngrams))
        for order in sorted({*counts, *declared}):
            if counts[order] != declared.get(order, 0):
                raise ValueError(
                    f"it has {counts[order]} {order}-grams, but its head says "
                    f"{declared.get(order, 0)}"
                )
        if END not in self._words:
            raise ValueError(f"it has no {END}, the end of a text")

    def __contains__(self, word: str) -> bool:
        return word in self._words

    def history(self, *, begins: bool) -> tuple[int, ...]:
        return (self._words[BEGIN],) if begins and BEGIN in self._words else ()

    def score(self, history: tuple[int, ...], word: str) -> tuple[float, tuple[int, ...]]:
        """See NGrams; Katz' backing off."""
        number = self._words.get(word, self._words.get(UNKNOWN))
        if number is None:
            return _NONE, ()
        total, context = 0.0, history
        while (entry := self._ngrams.get((*context, number))) is None and context:
            total += self._ngrams.get(context, (0.0, 0.0))[1]
            context = context[1:]
        after = (*history, number)[-self._most_history :] if self._most_history else ()
        while after and after not in self._ngrams:  # no longer n-gram begins with it
            after = after[1:]
        return total + (entry[0] if entry else _NONE), after


def _number(line: str, name: str, text: str, upper: float) -> float:
    number = float(text)
    if not -_LARGEST <= number <= upper:
        raise ValueError(
            f"{line[:80]!r} has as its {name} {number}; expected a number from {-_LARGEST:g} to "
            f"{upper:g}"
        )
    return number


class KenlmModel:
    """NGrams with a model of the package kenlm."""

    def __init__(self, package: Any, model: Any) -> None:
        self._package, self._model = package, model

    def __contains__(self, word: str) -> bool:
        return word in self._model

    def history(self, *, begins: bool) -> Any:
        state = self._package.State()
        (self._model.BeginSentenceWrite if begins else self._model.NullContextWrite)(state)
        return state

    def score(self, history: Any, word: str) -> tuple[float, Any]:
        after = self._package.State()
        return self._model.BaseScore(history, word, after), after


def read_ngrams(path: Path) -> NGrams:
    """Return the model of a file: ARPA, possibly compressed with gzip, or KenLM's binary form.

    InputError: the file is neither, or needs the package kenlm, which is not installed.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
        check_utf_8(head)
        is_packed = head.startswith(_GZIP)
        if is_packed or _ARPA in head:
            with gzip.open(path) if is_packed else path.open("rb") as opened:
                with opened_text(opened) as lines:
                    return ArpaModel(lines)
        package: Any = importlib.import_module("kenlm")
        return KenlmModel(package, package.Model(str(path)))
    except ImportError as error:
        raise InputError(
            f"{path} is no ARPA file; KenLM's binary form needs the package kenlm: pip install "
            "'dsbd-ort[lm]'"
        ) from error
    except (OSError, ValueError, EOFError, RuntimeError, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path} is no language model ({reason}); expected an ARPA file, or one of KenLM's "
            "build_binary"
        ) from error
