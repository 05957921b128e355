"""Tokens are grouped into words, and placed in the audio, as in transformers."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from transformers import WhisperTokenizer
from transformers.models.whisper import tokenization_whisper
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_ort.speech.words import grouped, smoothed, token_positions, warped
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
    """Many of them are bytes that are no character."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, TOKENS.end, int(rng.integers(1, 30))).tolist()
    for language in ("en", "ja"):
        check_equal(tokens, language, backend, theirs)


def test_no_tokens(backend):
    assert grouped([], lambda ids: backend.decode(list(ids)), has_spaces=True) == []


WARPED = [  # costs, the first position of each token
    ([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]], [0, 1, 2]),
    ([[0.0, 0.0, 9.0], [9.0, 9.0, 0.0]], [0, 2]),
    ([[5.0, 5.0]], [0]),
    ([[1.0], [2.0]], [0, 0]),  # more tokens than positions
    ([[0.0, 0.0], [0.0, 0.0]], [0, 0]),  # of equal ways that which stays longest at the last token
]


@pytest.mark.parametrize(("costs", "wanted"), WARPED)
def test_the_cheapest_way(costs, wanted):
    assert warped(np.array(costs, np.float32)).tolist() == wanted


def first_positions(costs: np.ndarray) -> list[int]:
    """The first position of each token on transformers' path."""
    tokens, positions = _dynamic_time_warping(costs.astype(np.float64))
    begins = np.pad(np.diff(tokens), (1, 0), constant_values=1).astype(bool)
    return positions[begins].tolist()


@pytest.mark.parametrize("seed", range(12))
def test_ways_are_those_of_transformers(seed):
    rng = np.random.default_rng(seed)
    shape = rng.integers(1, 40), rng.integers(1, 60)
    for costs in (
        rng.standard_normal(shape),
        rng.integers(-2, 2, shape),  # many ties
        rng.standard_normal(shape) * 1e-8 - 1,  # that rounding decides
    ):
        assert warped(costs.astype(np.float32)).tolist() == first_positions(
            costs.astype(np.float32)
        )


@pytest.mark.parametrize("num_positions", [2, 4, 50])
@pytest.mark.parametrize("width", [1, 7])
def test_weights_are_smoothed_as_by_transformers(num_positions, width):
    rng = np.random.default_rng(num_positions)
    weights = rng.random((3, 9, num_positions), dtype=np.float32)
    of_torch = torch.from_numpy(weights)[None]
    deviation, mean = torch.std_mean(of_torch, dim=-2, keepdim=True, correction=0)
    wanted = _median_filter((of_torch - mean) / deviation, width).mean(dim=1)[0].numpy()
    assert np.abs(smoothed(weights, width) - wanted).max() < 1e-5


def test_a_position_that_all_weigh_alike_says_nothing():
    weights = np.random.default_rng(0).random((2, 4, 20), dtype=np.float32)
    weights[:, :, 5:12] = 0.25  # whose deviation is 0
    assert np.isfinite(smoothed(weights, 7)).all()


def test_few_tokens():
    assert token_positions(np.zeros((2, 0, 9), np.float32), 7).tolist() == [0]
    one = np.random.default_rng(1).random((2, 1, 9), dtype=np.float32)
    assert token_positions(one, 7).tolist() == [0, 0]
    several = np.random.default_rng(1).random((2, 6, 90), dtype=np.float32)
    found = token_positions(several, 7)
    assert len(found) == 7 and found[-1] == found[-2] and (np.diff(found) >= 0).all()
