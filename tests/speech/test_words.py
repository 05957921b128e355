"""Tokens are grouped into words as transformers groups them."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from transformers import WhisperTokenizer
from transformers.models.whisper import tokenization_whisper
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_ort.speech.words import grouped
from scripts.speech_checkpoint import TOKENS, speech_tokenizer

TEXTS = [  # code of the language, text
    ("en", " The quick brown fox (a \"small\" one) says: 'hello', -- and so on..."),
    ("en", "No space in front, 3.5% and A/B; don't!"),
    ("de", " „Das Haus“ ist klein, (und alt) - aber schön?"),
    ("es", " ¿Qué dice? ¡Nada! [ruido]"),
    ("zh", "他说\uff1a“你好\uff0c世界\uff01”然后走了。"),
    ("ja", "これはペンです、ね\uff1f"),
    ("th", "สวัสดีครับ ผมชื่อ"),
    ("yue", "我哋去邊度呀\uff1f"),
    ("ru", " Это дом."),
    ("en", " "),
    ("en", " ( (("),
    ("en", ' \U0001f98a fox\n\nline " '),
]


@pytest.fixture(scope="module")
def backend() -> Backend:
    return speech_tokenizer()


@pytest.fixture(scope="module")
def theirs(whisper) -> WhisperTokenizer:
    with quiet_libraries():
        return WhisperTokenizer.from_pretrained(whisper / "target")


def check_equal(tokens: list[int], language: str, backend, theirs) -> None:
    words, _, indices = tokenization_whisper._combine_tokens_into_words(
        theirs, tokens, LANGUAGES[language]
    )
    has_spaces = language not in ("zh", "ja", "th", "lo", "my", "yue")
    found = grouped(tokens, lambda ids: backend.decode(list(ids)), has_spaces=has_spaces)
    assert [index for word in found for index in word.indices] == list(range(len(tokens)))
    if sum(map(len, indices)) < len(tokens):
        # transformers loses its place in bytes that are no character, and drops what follows; here
        # that is part of the last word
        words, indices = words[:-1], indices[:-1]
        found = found[: len(words)]
    assert [word.text for word in found] == words
    assert [word.indices for word in found] == indices


@pytest.mark.parametrize(("language", "text"), TEXTS)
def test_words_of_a_text(language, text, backend, theirs):
    tokens = backend.encode(text, add_special_tokens=False).ids
    assert max(tokens) < TOKENS.end
    check_equal(tokens, language, backend, theirs)


@pytest.mark.parametrize("seed", range(20))
def test_words_of_any_tokens(seed, backend, theirs):
    """Of which many are bytes that are no character."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, TOKENS.end, int(rng.integers(1, 30))).tolist()
    for language in ("en", "ja"):
        check_equal(tokens, language, backend, theirs)


def test_no_tokens(backend):
    assert grouped([], lambda ids: backend.decode(list(ids)), has_spaces=True) == []
