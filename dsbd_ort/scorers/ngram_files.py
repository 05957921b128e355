"""N-gram language models of words, read from files: ARPA by this module, KenLM's by ``kenlm``."""

from __future__ import annotations

import gzip
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from dsbd_runtime.errors import InputError

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
_ARPA, _GZIP = b"\\data\\", b"\x1f\x8b"
_HEAD = 2**14  # bytes of a file, among which comments may precede ``_ARPA``
_NONE = -100.0  # log10 of a word that the model lacks, if it has no <unk>


class NGrams(Protocol):
    """A language model of words. A history is opaque and immutable."""

    def __contains__(self, word: str) -> bool: ...

    def history(self, *, begins: bool) -> Any:
        """Return the history of nothing; ``begins``: of the beginning of a sentence."""

    def score(self, history: Any, word: str) -> tuple[float, Any]:
        """Return log10 of the probability of a word after a history, and the history after it."""


class ArpaModel:
    """N-grams of an ARPA file, in memory: about 300 bytes for each n-gram."""

    def __init__(self, lines: Iterator[str]) -> None:
        """Read an ARPA file; ValueError: it is none."""
        self._words: dict[str, int] = {}
        self._ngrams: dict[tuple[int, ...], tuple[float, float]] = {}
        order = 0
        for line in lines:
            text = line.strip()
            if text.startswith("\\") and text.endswith("-grams:"):
                order = int(text[1 : -len("-grams:")])
            elif text == "\\end\\":
                break
            elif order and text:
                self._add(text, order)
        else:
            raise ValueError("it has no line \\end\\")
        self._most_history = max(map(len, self._ngrams), default=1) - 1

    def _add(self, line: str, order: int) -> None:
        log_prob, *words = line.split()
        backoff = float(words.pop()) if len(words) == order + 1 else 0.0
        if len(words) != order:
            raise ValueError(f"the {order}-gram {line[:80]!r} has {len(words)} words")
        if order == 1:
            self._words[words[0]] = len(self._words)
        try:
            key = tuple(self._words[word] for word in words)
        except KeyError as error:
            raise ValueError(f"the word {error} of {line[:80]!r} is no 1-gram") from error
        self._ngrams[key] = float(log_prob), backoff

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
        while (found := self._ngrams.get((*context, number))) is None and context:
            total += self._ngrams.get(context, (0.0, 0.0))[1]
            context = context[1:]
        after = (*history, number)[-self._most_history :] if self._most_history else ()
        while after and after not in self._ngrams:  # no longer n-gram begins with it
            after = after[1:]
        return total + (found[0] if found else _NONE), after


class KenlmModel:
    """A model of the package kenlm, as NGrams."""

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
    """Return the model of a file: ARPA, which may be packed with gzip, or KenLM's binary form.

    InputError: the file is neither, or needs the package kenlm, which is not installed.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
        is_packed = head.startswith(_GZIP)
        if is_packed or _ARPA in head:
            packed = gzip.open(path, "rt", encoding="utf-8") if is_packed else None
            with packed or path.open(encoding="utf-8") as lines:
                return ArpaModel(iter(lines))
        package: Any = importlib.import_module("kenlm")
        return KenlmModel(package, package.Model(str(path)))
    except ImportError as error:
        raise InputError(
            f"{path} is no ARPA file; KenLM's binary form needs the package kenlm: pip install "
            "'dsbd-ort[lm]'"
        ) from error
    except (OSError, ValueError, EOFError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path} is no language model ({reason}); expected an ARPA file, or one of KenLM's "
            "build_binary"
        ) from error
