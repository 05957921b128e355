"""How the tokens of a vocabulary join into text, read from the tokenizer's decoder.

A decoder is a chain of steps. Most treat each token by itself; some join the tokens first
(``Fuse``, ``ByteLevel``), and what follows those sees one long text. ``stream_decoder`` asks which
text a later token can still change; this module answers it for the whole chain:

* ``ByteLevel`` (GPT-2, Llama 3, Qwen): tokens are bytes. A character begun at the end of the text
  is one U+FFFD until its last byte arrives; all text before it is certain.
* ``ByteFallback`` (Llama 2, Mistral, Gemma): tokens such as ``<0xE2>`` are bytes. A run of them is
  decoded as a whole: to its text if all of it is UTF-8, else to one U+FFFD a byte.
* A step that looks for text across tokens (``Replace`` of a regular expression after ``Fuse``, for
  example) can change anything: nothing is certain before the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MOST_STRIPPED = 2
"""Characters that a ``Strip`` may take from the beginning of the joined text."""

_SPELLING_OF_BYTES = frozenset("<0x123456789abcdefABCDEF+>")
_BY_TOKEN = ("Replace", "Strip", "Metaspace", "WordPiece", "BPEDecoder", "ByteFallback")


@dataclass(frozen=True, kw_only=True)
class TextJoints:
    """What later tokens can change in the text of those before.

    Attributes:
        is_local: whether no step looks for text across tokens; else anything can change.
        joins_bytes: whether tokens are bytes (``ByteLevel``).
        has_byte_runs: whether some tokens are bytes, decoded a run at a time (``ByteFallback``).
    """

    is_local: bool
    joins_bytes: bool = False
    has_byte_runs: bool = False


def joints_of(decoder: Mapping[str, Any] | None) -> TextJoints:
    """Return the joints of a decoder, given as the JSON of tokenizer.json; None is no decoder."""
    steps = list(_steps(decoder))
    kinds = [step.get("type") for step in steps]
    joins_bytes, has_byte_runs = "ByteLevel" in kinds, "ByteFallback" in kinds
    num_by_token = next((i for i, k in enumerate(kinds) if k in ("Fuse", "ByteLevel")), len(kinds))
    num_before_bytes = kinds.index("ByteFallback") if has_byte_runs else 0
    is_local = (
        all(kind in _BY_TOKEN for kind in kinds[:num_by_token])
        and all(_keeps_bytes(step) for step in steps[:num_before_bytes])
        and kinds.count("ByteFallback") <= 1
        and not (joins_bytes and has_byte_runs)
        and all(_is_by_character(step) for step in steps[num_by_token + 1 :])
    )
    return TextJoints(
        is_local=is_local,
        joins_bytes=is_local and joins_bytes,
        has_byte_runs=is_local and has_byte_runs,
    )


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a decoder, those of a ``Sequence`` in its place."""
    if decoder is None:
        return
    if decoder.get("type") != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _steps(step)


def _keeps_bytes(step: Mapping[str, Any]) -> bool:
    """Return whether a step before ``ByteFallback`` leaves every ``<0xE2>`` as it is."""
    pattern = _replaced_text(step)
    return bool(pattern) and _SPELLING_OF_BYTES.isdisjoint(f"{pattern}{step['content']}")


def _is_by_character(step: Mapping[str, Any]) -> bool:
    """Return whether a step on the joined text treats each character by itself."""
    if step.get("type") == "Strip":
        return int(step["start"]) <= MOST_STRIPPED and not step["stop"]
    return step.get("type") in ("Fuse", "Metaspace") or len(_replaced_text(step)) == 1


def _replaced_text(step: Mapping[str, Any]) -> str:
    """Return the plain text that a ``Replace`` looks for, "" for every other step."""
    pattern = step.get("pattern") if step.get("type") == "Replace" else None
    return str(pattern.get("String", "")) if isinstance(pattern, dict) else ""
