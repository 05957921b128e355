"""Tokens as a person can read them: spaces, line ends and parts of characters made visible."""

from __future__ import annotations

from dsbd_runtime.stream_decoder import REPLACEMENT
from dsbd_runtime.tokenizer import Tokenizer

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_BY_SYMBOL = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + index): byte for index, byte in enumerate(_OTHERS)
}
"""How byte-level BPE (GPT-2) spells bytes: printable Latin-1 as itself, others from U+0100 on."""

_VISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    r"""Return a token as text: ``·def``, ``⏎``, ``<eos>``, ``\xe2\x82`` (part of a character)."""
    text, piece = tokenizer.decode([token_id]), tokenizer.piece(token_id)
    if not text or REPLACEMENT in text:  # a special token, or bytes that are no character
        is_spelled = all(symbol in BYTE_BY_SYMBOL for symbol in piece) and not piece.isascii()
        return "".join(f"\\x{BYTE_BY_SYMBOL[s]:02x}" for s in piece) if is_spelled else piece
    if piece.startswith("▁") and not text.startswith(" "):  # dropped at the start of a text
        text = " " + text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    return character if character.isprintable() else ascii(character)[1:-1]
