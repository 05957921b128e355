"""An n-gram model of words as a scorer: its file, its words over tokens, requests with it."""

import gzip
import math
import re
from pathlib import Path

import numpy as np
import pytest

from dsbd_ort.decoding.errors import ConfigError
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.scorers import LanguageModel, added_score
from dsbd_ort.scorers.ngram_files import ArpaModel, KenlmModel
from dsbd_runtime.errors import InputError
from dsbd_runtime.text.tokenizer import Tokenizer

ARPA = r"""made by hand
\data\
ngram 1=6
ngram 2=4
ngram 3=1

\1-grams:
-99 <s> -0.3
-1.2 </s>
-2.5 <unk>
-0.9 the -0.4
-1.1 fox -0.2
-1.4 return

\2-grams:
-0.2 <s> the -0.1
-0.5 the fox -0.6
-0.7 fox </s>
-0.8 fox the

\3-grams:
-0.1 <s> the fox

\end\
"""
FLAT = {"weight": 1.0 / math.log(10.0), "word_bonus": 0.25, "unknown_offset": -1.0}
"""Scores in log10, as the file has them."""


@pytest.fixture(scope="module")
def arpa(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("lm") / "words.arpa"
    file.write_text(ARPA)
    return file


SENTENCES = [  # words after <s>, log10 of each
    (["the", "fox", "</s>"], [-0.2, -0.1, -0.7]),  # "the fox </s>" is none: backs off by -0.6
    (["the", "the"], [-0.2, -0.1 - 0.4 - 0.9]),
    (["fox", "the", "fox"], [-0.3 - 1.1, -0.8, -0.5]),
    (["cow", "fox"], [-0.3 - 2.5, -1.1]),
]


@pytest.mark.parametrize(("words", "wanted"), SENTENCES)
def test_probabilities_of_an_arpa_file(words, wanted):
    model = ArpaModel(iter(ARPA.splitlines()))
    history, found = model.history(begins=True), []
    for word in words:
        score, history = model.score(history, word)
        found.append(score)
    wanted = [*wanted[:2], wanted[2] - 0.6] if words[-1] == "</s>" else wanted
    assert found == pytest.approx(wanted)


def test_kenlm_gives_the_same_as_our_reader(arpa):
    kenlm = pytest.importorskip("kenlm")
    text = arpa.with_suffix(".text")
    text.write_text(ARPA.partition("\n")[2])  # theirs begins with \\data\\
    own, theirs = ArpaModel(iter(ARPA.splitlines())), KenlmModel(kenlm, kenlm.Model(str(text)))
    rng = np.random.default_rng(0)
    for begins in (False, True) * 50:
        words = [*rng.choice(["the", "fox", "return", "cow"], 5).tolist(), "</s>"]
        totals = []
        for model in (own, theirs):
            history, total = model.history(begins=begins), 0.0
            for word in words:
                assert (word in model) == (word != "cow")
                score, history = model.score(history, word)
                total += score
            totals.append(total)
        assert totals[0] == pytest.approx(totals[1], abs=1e-5)


def by_words(model: ArpaModel, text: str, *, is_whole: bool) -> float:
    """Score the words of a text at once; without white space after it its last word is open."""
    words = text.split()
    if not is_whole and not text.endswith((" ", "\n")):
        words = words[:-1]
    history, total = model.history(begins=True), 0.0
    for word in words:
        word = word.strip(".,!?\"'()-").lower()
        if not word:
            continue
        score, history = model.score(history, word)
        total += score + 0.25 - (word not in model)
    return total + (model.score(history, "</s>")[0] if is_whole else 0.0)


TEXTS = ["The fox, the\nfox.", "the foxes the fox", "  return (the fox)\n\n", "fox - the", "é fox!"]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_add_the_scores_of_the_words(arpa, demo_pipe: Pipeline, text):
    tokenizer = demo_pipe.tokenizer
    [eos] = demo_pipe.bundle.manifest.target.eos_token_ids
    vocab_size = demo_pipe.bundle.manifest.target.vocab_size
    model, scorer = (
        ArpaModel(iter(ARPA.splitlines())),
        LanguageModel(arpa, **FLAT).bind(tokenizer, vocab_size, [eos]),
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text.split())
    for split in range(len(ids)):
        begun = by_words(model, tokenizer.decode(ids[:split]), is_whole=False)
        whole = by_words(model, text, is_whole=True) - begun
        found = added_score(scorer, ids[:split], [*ids[split:], eos])
        assert found == pytest.approx(whole, abs=1e-9), split
    states = scorer.start(ids)
    rows = scorer.scores(states, None)
    assert rows.shape == (1, vocab_size) and (rows <= scorer.highest(states)[:, None]).all()
    some = np.array([[5, eos, 9, -1]])
    assert (scorer.scores(states, some)[0, :3] == rows[0, [5, eos, 9]]).all()


def test_white_space_within_a_token_is_owed_to_the_next_one(arpa):
    class Words:
        special_token_ids = frozenset({0})
        bytes_of = staticmethod([b"<end>", b"the", b"e fox th", b" ", b"th", b"\xc3"].__getitem__)

    scorer = LanguageModel(arpa, **FLAT).bind(Words(), 6, [0])
    model = ArpaModel(iter(ARPA.splitlines()))
    for ids, text in (([4, 2, 2, 3], "the fox the fox th"), ([1, 3, 5, 3, 1], "the the")):
        found = added_score(scorer, [], [*ids, 0])
        assert found == pytest.approx(by_words(model, text, is_whole=True))


@pytest.mark.parametrize(
    ("plain", "drafted"),
    [
        ("beam-search", "speculative-beam-search"),
        ("beam-sample", "dsbd"),
        ("sample", "speculative"),
    ],
)
def test_a_draft_changes_nothing(arpa, demo_pipe: Pipeline, plain, drafted):
    options = {"max_new_tokens": 24, "seed": 3}
    if plain != "sample":
        options |= {"num_beams": 3, "num_return_sequences": 3}
    lm = LanguageModel(arpa, weight=0.8, word_bonus=1.0)
    free = demo_pipe.generate("def read(", strategy=plain, **options).sequences
    scored = demo_pipe.generate("def read(", strategy=plain, scorers=[lm], **options).sequences
    both = demo_pipe.generate("def read(", strategy=drafted, scorers=[lm], **options).sequences
    assert [each.token_ids for each in both] == [each.token_ids for each in scored]
    assert [each.token_ids for each in scored] != [each.token_ids for each in free]


def test_a_word_that_the_model_favours_is_written(tmp_path, demo_pipe: Pipeline):
    file = tmp_path / "one.arpa"
    lines = ["\\data\\", "ngram 1=4", "\\1-grams:"]
    lines += ["-9 <s>", "-9 </s>", "-9 <unk>", "-0.01 return", "\\end\\"]
    with gzip.open(file, "wt") as out:
        out.write("\n".join(lines))
    lm = LanguageModel(file, weight=3.0, word_bonus=0.0)
    found = demo_pipe.generate(
        "def f():\n    ", scorers=[lm], num_beams=4, strategy="beam-search", max_new_tokens=12
    )
    assert found.sequences[0].text.split()[0] == "return"


BAD = [
    ("hello", "is no ARPA file; KenLM's binary form needs|is no language model"),
    ("\\data\\\n\\1-grams:\n-1 a b c d\n\\end\\", "is no language model"),
    ("\\data\\\n\\1-grams:\n-1 a\n\\2-grams:\n-1 a b\n\\end\\", "is no language model"),
    ("\\data\\\n\\1-grams:\n-1 a\n", "is no language model"),
]

DAMAGED = [  # (text of ``ARPA``, its replacement, words of the error)
    ("-1.2 </s>", "nan </s>", "its log10 nan; expected a number from -1e+06 to 0"),
    ("-1.2 </s>", "-inf </s>", "its log10 -inf; expected a number from -1e+06 to 0"),
    ("-0.9 the", "-1e999 the", "its log10 -inf; expected"),
    ("-0.9 the", "0.5 the", "its log10 0.5; expected"),
    ("-0.9 the", "-x the", "could not convert"),
    ("the -0.4", "the nan", "its backoff nan; expected a number from -1e+06 to 1e+06"),
    ("the -0.4", "the 1e999", "its backoff inf; expected"),
    ("-0.9 the -0.4\n", "-0.9 the -0.4\n-0.8 the\n", "'-0.8 the' is there twice"),
    ("ngram 1=6", "ngram 1=7", "it has 6 1-grams, but its head says 7"),
    ("ngram 2=4\n", "", "it has 4 2-grams, but its head says 0"),
    ("ngram 3=1", "ngram 3=1\nngram 4=2", "it has 0 4-grams, but its head says 2"),
    ("\\2-grams:", "\\3-grams:", "\\3-grams: follows; expected \\2-grams:"),
    ("-1.2 </s>\n", "", "it has no </s>, the end of a text"),
    ("\\end\\", "", "no line"),
]


@pytest.mark.parametrize(("text", "replaced", "words"), DAMAGED)
def test_numbers_are_checked_when_a_file_is_read(tmp_path, text, replaced, words):
    assert text in ARPA
    file = tmp_path / "bad.arpa"
    content = ARPA.replace(text, replaced, 1)
    if text.endswith("</s>\n"):
        content = content.replace("-0.7 fox </s>\n", "").replace("2=4", "2=3").replace("1=6", "1=5")
    file.write_text(content)
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        LanguageModel(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_damaged_packed_files_are_refused_in_one_line(tmp_path):
    file, packed = tmp_path / "bad.arpa.gz", gzip.compress(ARPA.encode())
    damaged = {
        "checksum": packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:],
        "length": packed[:-1] + b"\1",
        "end": packed[:-12],
        **{
            place: packed[:place] + bytes([packed[place] ^ 255]) + packed[place + 1 :]
            for place in range(12, len(packed) - 8, 9)
        },
    }
    for name, content in damaged.items():
        file.write_bytes(content)
        with pytest.raises(InputError, match="is no language model") as caught:
            LanguageModel(file)
        assert "\n" not in str(caught.value), name


@pytest.mark.parametrize(("content", "words"), BAD)
def test_what_is_no_model_is_refused_in_one_line(tmp_path, content, words):
    file = tmp_path / "bad.arpa"
    file.write_text(content)
    with pytest.raises(InputError, match=words) as caught:
        LanguageModel(file)
    assert "\n" not in str(caught.value)


def test_other_misuse(arpa, tmp_path, demo_pipe: Pipeline):
    with pytest.raises(InputError, match=r"is no language model .*No such file|cannot be read"):
        LanguageModel(tmp_path / "none.arpa")
    with pytest.raises(ConfigError, match=r"weight is -1.0; expected a number from 0 to 100"):
        LanguageModel(arpa, weight=-1.0)
    with pytest.raises(ConfigError, match="scorers is 3; expected a list of scorers"):
        demo_pipe.generate("a", scorers=[3])
    with pytest.raises(ConfigError, match=r"scorers is LanguageModel\(.*; expected a list of sc"):
        demo_pipe.generate("a", scorers=LanguageModel(arpa))


def test_special_tokens_of_a_tokenizer(demo_pipe: Pipeline):
    tokenizer: Tokenizer = demo_pipe.tokenizer
    special = tokenizer.special_token_ids
    assert special and all(tokenizer.decode([each]) == "" for each in special)


def test_a_text_without_white_space_takes_bounded_memory(arpa, demo_pipe: Pipeline):
    """An end of sequence outside the vocabulary is no error here: such a request is refused."""
    scorer = LanguageModel(arpa).bind(demo_pipe.tokenizer, 300, [5, 10**9])
    [letter] = demo_pipe.tokenizer.encode("x", add_special_tokens=False)
    states = scorer.start([letter])
    for _ in range(2_000):
        states = scorer.advance(states, np.array([letter]))
    assert len(states[0].text) == 256
