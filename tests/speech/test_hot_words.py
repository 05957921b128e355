"""Hot words: what a text gains by them, token by token."""

import itertools

import numpy as np
import pytest

from dsbd_ort import Pipeline
from dsbd_ort.scorers import added_score
from dsbd_ort.speech.hot_words import HotWords, read_hot_words
from dsbd_runtime.errors import InputError

VOCAB_SIZE = 8
GAIN = 2.0
TEXTS = [  # (words, text, what it has gained after each token, in tokens)
    ([(1, 2, 3)], (1, 2, 3, 5), (1, 2, 3, 3)),
    ([(1, 2, 3)], (1, 2, 5, 1), (1, 2, 0, 1)),
    ([(1, 2, 3)], (5, 1, 1, 2, 3), (0, 1, 1, 2, 3)),  # begun anew
    ([(1, 2), (1, 2, 3)], (1, 2, 3), (1, 2, 3)),
    ([(1, 2), (1, 2, 3, 4)], (1, 2, 3, 5), (1, 2, 3, 2)),  # the shorter one stays
    ([(1, 2, 3), (2, 4)], (1, 2, 4), (1, 2, 2)),  # another begins within what is lost
    ([(1, 2), (2, 3)], (1, 2, 3), (1, 2, 2)),  # no token counts twice
    ([(4,)], (4, 4, 5), (1, 2, 2)),
    ([(1, 1, 2)], (1, 1, 1, 2), (1, 2, 2, 3)),
]


def stepwise(words, text, prompt=()):
    """Gain of each token of a text, by the scores."""
    hot = HotWords(words, GAIN, VOCAB_SIZE)
    states, gains = hot.start(prompt), []
    for token in text:
        of_all = hot.scores(states, None)[0]
        listed = np.array([[-1, token, 7, 0]])
        assert (hot.scores(states, listed)[0, 1:] == of_all[listed[0, 1:]]).all()
        gains.append(of_all[token] / GAIN)
        states = hot.advance(states, np.array([token]))
    return gains


@pytest.mark.parametrize(("words", "text", "wanted"), TEXTS)
def test_what_a_text_gains(words, text, wanted):
    assert tuple(itertools.accumulate(stepwise(words, text))) == wanted
    assert added_score(HotWords(words, GAIN, VOCAB_SIZE), (), text) == GAIN * wanted[-1]


def test_the_gain_of_any_text_is_that_of_its_tokens_and_never_negative():
    rng = np.random.default_rng(0)
    for _ in range(300):
        words = [tuple(rng.integers(0, 4, rng.integers(1, 5)).tolist()) for _ in range(3)]
        text = tuple(rng.integers(0, 4, 12).tolist())
        split = int(rng.integers(0, 12))
        gains = stepwise(words, text[split:], prompt=text[:split])
        whole = added_score(HotWords(words, GAIN, VOCAB_SIZE), (), text)
        before = added_score(HotWords(words, GAIN, VOCAB_SIZE), (), text[:split])
        assert whole - before == pytest.approx(GAIN * sum(gains))
        assert 0 <= whole <= GAIN * len(text)


def test_words_are_read_as_they_stand_in_a_text(speech_pipe: Pipeline):
    words = speech_pipe.tokenizer
    [found] = read_hot_words(["  brown fox "], words)
    assert words.decode([*found]) == " brown fox"
    assert read_hot_words(None, words) == ()
    with pytest.raises(InputError, match="hot_words has 2000 texts; expected 1024 at most"):
        read_hot_words(["fox"] * 2000, words)


def test_a_hot_word_is_said(speech_pipe: Pipeline):
    """Of a random model, by a gain that nothing else can outweigh; drafted as well."""
    samples = 0.1 * np.sin(np.arange(16_000, dtype=np.float32) / 7)
    options = {"max_new_tokens": 12, "temperature": 0.0, "language": "en"}
    plain = speech_pipe.transcribe(samples, strategy="beam-search", **options)
    assert "brown fox" not in plain.text
    options |= {"hot_words": ["brown fox"], "hot_word_gain": 30.0}
    for num_beams, strategy in ((1, "greedy"), (5, "beam-search")):
        found = [
            speech_pipe.transcribe(samples, strategy=each, num_beams=num_beams, **options)
            for each in (strategy, "speculative-beam-search")
        ]
        assert all("brown fox" in each.text for each in found)
        wanted, drafted = ([each.token_ids for each in one.segments] for one in found)
        assert drafted == wanted
