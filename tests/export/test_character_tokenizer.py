"""Tokenizers of Japanese characters (manga-ocr), which transformers has in Python alone."""

# ruff: noqa: RUF001 - wide letters, which are read as others

import importlib.util
import json

import pytest
from transformers import BertJapaneseTokenizer

from dsbd_export.tokenizers.older_tokenizers import character_tokenizer, is_of_characters

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CHARACTERS = "こんにちは世界、!。Ａabc漫画のﾊﾟ…パ12３"
TEXTS = (
    "こんにちは世界",
    "漫画、の 世界 !",
    "ａｂｃ ＡＢＣ １２３",
    "ﾊﾟパ…。",
    "知らない\u3000字 abc\t12",
    "[MASK]の[SEP]",
    "",
)


def written(folder, word_tokenizer, **more):
    tokens = list(dict.fromkeys([*SPECIAL, *CHARACTERS, "##a", "…"]))
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), "utf-8")
    settings = {
        "tokenizer_class": "BertJapaneseTokenizer",
        "word_tokenizer_type": word_tokenizer,
        "subword_tokenizer_type": "character",
        **more,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return folder


def check(folder, texts):
    assert is_of_characters(folder)
    ours, theirs = character_tokenizer(folder), BertJapaneseTokenizer.from_pretrained(folder)
    for text in texts:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        for skips in (True, False):
            written = [each.decode(ids, skip_special_tokens=skips) for each in (ours, theirs)]
            assert written[0] == written[1]
    every = list(range(len(theirs)))
    assert ours.decode(every) == theirs.decode(every)


def test_words_of_spaces_and_punctuation(tmp_path):
    """Transformers' own splitter normalizes nothing."""
    plain = [text for text in TEXTS if not set(text) & set("ａＡ１ﾊ…\u3000")]
    assert len(plain) == 4
    check(written(tmp_path, "basic"), plain)


@pytest.mark.skipif(not importlib.util.find_spec("fugashi"), reason="MeCab is not installed")
@pytest.mark.parametrize("lower", [False, True])
def test_words_of_mecab(lower, tmp_path):
    check(written(tmp_path, "mecab", do_lower_case=lower), TEXTS)


def test_other_tokenizers_of_bert_are_not_of_characters(tmp_path):
    assert not is_of_characters(written(tmp_path, "basic", subword_tokenizer_type="wordpiece"))
    assert not is_of_characters(written(tmp_path, "basic", tokenizer_class="BertTokenizer"))
