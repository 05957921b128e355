"""Every token has a name that can be read."""

from __future__ import annotations

import pytest

from dsbd_ort.trace_page.trace_file import BYTE_BY_SYMBOL, token_label

LABELS = {  # piece, decoded alone: label
    ("Ġdef", " def"): "·def",
    ("ĊĊ", "\n\n"): "⏎⏎",
    ("ĉx", "\tx"): "⇥x",
    ("<|end|>", ""): "<|end|>",  # special tokens decode to nothing
    ("Ã", "\ufffd"): "\\xc3",
    ("âĤ", "\ufffd\ufffd"): "\\xe2\\x82",
    ("ï¿½", "\ufffd"): "\\xef\\xbf\\xbd",  # the replacement character itself
    ("▁def", "def"): "·def",  # SentencePiece: a space is dropped at the start of a text
    ("<0xE2>", "\ufffd"): "<0xE2>",
    ("Ċ", "\x07"): "\\x07",
    ("é", "é"): "é",
}


class OneToken:
    """A tokenizer of one token."""

    def __init__(self, piece, text):
        self._piece, self._text = piece, text

    def decode(self, token_ids):
        return self._text

    def piece(self, token_id):
        return self._piece


@pytest.mark.parametrize(("spelled", "label"), LABELS.items())
def test_labels(spelled, label):
    assert token_label(OneToken(*spelled), 7) == label


def test_byte_symbols_are_those_of_the_library(pipeline):
    assert len(BYTE_BY_SYMBOL) == 256 == len(set(BYTE_BY_SYMBOL.values()))
    for text in ("é", "\x00 \xad", "日本"):
        pieces = [pipeline.tokenizer.piece(i) for i in pipeline.tokenizer.encode(text)]
        assert bytes(BYTE_BY_SYMBOL[symbol] for symbol in "".join(pieces)) == text.encode()


def test_a_token_outside_the_vocabulary_is_named_by_its_number(pipeline):
    assert token_label(pipeline.tokenizer, 99_999) == "<99999>"
