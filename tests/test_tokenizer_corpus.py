"""Corpus of tokenizers: transformers loads every kind, with tokens that tokenizer.json lacks."""

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from tests.tokenizer_corpus import CORPUS, random_texts, write_tokenizer


@pytest.mark.parametrize("name", CORPUS)
def test_kinds(name, tmp_path):
    folder = write_tokenizer(name, tmp_path)
    with quiet_libraries():
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert loaded.is_fast
    written = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for token in CORPUS[name].own_tokens:
        assert written.token_to_id(token) is None
        assert len(loaded.encode(token, add_special_tokens=False)) == 1


def test_random_texts():
    texts = random_texts(500, tokens=["<s>"])
    assert texts == random_texts(500, tokens=["<s>"]) != random_texts(500, seed=1, tokens=["<s>"])
    assert len(set(texts)) > 450
    assert any("<s>" in text for text in texts)
