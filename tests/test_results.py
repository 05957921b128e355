"""Text of results: stop strings found at the token that completes one, streams, and JSON."""

import functools
import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.requests.results import (
    StopFilter,
    StopSearch,
    TextStream,
    json_text,
    stop_state,
    text_before_stop,
    text_until_stop,
)
from dsbd_runtime.text.stream_decoder import TextWindow
from dsbd_runtime.text.tokenizer import Tokenizer
from tests.continuations import spelled_text, without_special
from tests.runtime.tiny_tokenizer import tiny_tokenizer
from tests.runtime.tokenizer_kinds import KINDS, saved
from tests.runtime.tokenizer_kinds import TEXTS as MANY_SCRIPTS

TEXTS = st.text(alphabet="ab€", max_size=20)
PIECES = st.lists(st.text(alphabet="ab€", max_size=3), max_size=10)
STOPS = st.lists(st.text(alphabet="ab€", min_size=2, max_size=5), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def tokenizer(tiny_bundle):
    return Tokenizer.from_bundle(tiny_bundle)


CUTS = [  # (text, stop strings, what is left)
    ("abc", ["b"], "a"),
    ("abc", ["c", "b"], "a"),
    ("abc", ["bd"], "abc"),
    ("abc", [], "abc"),
    ("abab", ["ab"], ""),
]


@pytest.mark.parametrize(("text", "stops", "left"), CUTS)
def test_text_is_cut_before_the_earliest_stop_string(text, stops, left):
    assert text_before_stop(text, stops) == left


def test_what_begins_like_a_stop_string_waits():
    shown = StopFilter(["</end>"])
    assert [shown.push(piece) for piece in ("one <", "/e", "x</en", "d> two", "three")] == [
        "one ",
        "",
        "</ex",
        "",
        "",
    ]
    assert shown.finish() == ""
    assert StopFilter(["ab"]).push("xa") == "x"


@given(PIECES, STOPS)
def test_filtered_pieces_are_the_text_before_the_stop(pieces, stops):
    shown, out = StopFilter(stops), []
    for end, piece in enumerate(pieces, start=1):
        out.append(shown.push(piece))
        so_far = "".join(pieces[:end])
        assert text_before_stop(so_far, stops).startswith("".join(out))
        if text_before_stop(so_far, stops) != so_far:  # here its sequence would have ended
            assert "".join(out) == text_before_stop(so_far, stops)
            return
    assert "".join(out) + shown.finish() == "".join(pieces)


@settings(deadline=None, max_examples=60)
@given(text=TEXTS, stops=STOPS)
def test_a_search_ends_with_the_token_that_completes_a_stop_string(tokenizer, text, stops):
    search = StopSearch(TextWindow(tokenizer), tuple(stops))
    for num_tokens, token in enumerate(ids := tokenizer.encode(text), start=1):
        search = search.extended(token)
        so_far = tokenizer.decode(ids[:num_tokens])
        assert search.has_ended == any(stop in so_far for stop in stops)


def test_paths_share_what_they_have_in_common(tokenizer):
    start = StopSearch(TextWindow(tokenizer), ("abc",))
    common = functools.reduce(StopSearch.extended, tokenizer.encode("ab"), start)
    (c,), (x,) = tokenizer.encode("c"), tokenizer.encode("x")
    assert common.extended(c).has_ended and not common.extended(x).has_ended
    assert not common.has_ended and common.extended(c).extended(x).has_ended


STOP_TEXTS = [
    ("é", "😀😀"),
    ("👩‍👩",),
    ("日本語です",),
    (" ",),
    ("'t it", "do n"),
    ("םולש",),
    ("é",),
]


@pytest.mark.parametrize("stops", STOP_TEXTS)
def test_a_stop_string_is_found_when_decode_says_so(any_tokenizer, stops):
    """At every token, for texts that contain it or nearly do, and for bytes that break it."""
    begun = any_tokenizer.encode("😀")[-4:]
    made = [f"xé{stop} y" for stop in stops]
    for text in (*MANY_SCRIPTS, *made, "😀😀", "é日本語です日本語です", "   "):
        whole = any_tokenizer.encode(text)
        for ids in (whole, [*begun[:2], *whole], [*whole, *begun[1:], *whole]):
            search = StopSearch(TextWindow(any_tokenizer), stops)
            for num_tokens, token in enumerate(ids, start=1):
                search = search.extended(token)
                so_far = any_tokenizer.decode(ids[:num_tokens])
                assert search.has_ended == any(stop in so_far for stop in stops)
                if search.has_ended:
                    break


S, T = "</s>", "<t>"  # special tokens
SPECIAL_STOPS = [
    (S,),
    (S + "\n",),
    ("c" + S,),
    (S + T,),
    ("b" + S + T + "d", T),
    (f"a{S}c", "Hell"),
]
SPECIAL_TEXTS = [
    f"Hello{S}\n", f"abc{S}d", f"{S}{T}", f"ab{S}{T}dd", f"a{T}c{S}cab", f"a{S}c",
    f"{T}{S}{S}c日本{S}",
]  # fmt: skip


KINDS_WITH_SPECIAL = (
    "byte_level_bpe byte_fallback_bpe llama_2 word_piece metaspace_bpe unigram across_tokens"
)


@pytest.mark.parametrize("kind", KINDS_WITH_SPECIAL.split())
def test_a_stop_string_names_special_tokens(kind, tmp_path):
    backend = KINDS[kind]()
    backend.add_special_tokens([S, T])
    tokenizer = saved(backend, tmp_path)
    all_ids = [tokenizer.encode(text, add_special_tokens=False) for text in SPECIAL_TEXTS]
    num_ended = 0
    for stops, ids in itertools.product(SPECIAL_STOPS, all_ids):
        start = TextWindow(tokenizer)
        search, end = stop_state(start, stops), 0
        while not search.has_ended and end < len(ids):
            search, end = search.extended(ids[end]), end + 1
        spelled = [spelled_text(start, ids[:count]) for count in range(end + 1)]
        assert not any(stop in text for stop in stops for text in spelled[:-1])
        assert search.has_ended == any(stop in spelled[-1] for stop in stops)
        wanted = without_special(tokenizer, text_before_stop(spelled[-1], stops))
        assert text_until_stop(start, ids[:end], DecodingConfig(stop_strings=stops)) == wanted
        stream = TextStream(start, stops)
        pieces = [stream.text_of([token]) for token in ids[:end]]
        assert "".join(pieces) + stream.rest() == wanted
        num_ended += search.has_ended
    assert num_ended > 10


def test_a_special_token_takes_the_spaces_that_it_strips(tmp_path):
    backend = tiny_tokenizer()
    strips = {"special": True, "normalized": False}
    backend.add_special_tokens(
        [AddedToken("<l>", lstrip=True, **strips), AddedToken("<l>r", rstrip=True, **strips)]
    )
    found = saved(backend, tmp_path).split_at_special_tokens("a \n<l>r \n<l> <b")
    assert found == ["a \n", 259, "", 258, " <b"]


def test_a_search_in_an_endless_run_of_bytes_is_linear(llama_2):
    ids = llama_2.encode("日本語" * 100)
    search = functools.reduce(
        StopSearch.extended, ids[:2], StopSearch(TextWindow(llama_2), ("です",))
    )
    before = llama_2.num_decoded
    functools.reduce(StopSearch.extended, ids[2:], search)
    assert llama_2.num_decoded - before < 30 * len(ids)


def test_numbers_that_json_does_not_have_become_null():
    fields = {"a": math.nan, "b": [math.inf, {"c": (-math.inf, 1.5)}], "d": None, "e": 10**300}
    expected = '{"a": null, "b": [null, {"c": [null, 1.5]}], "d": null, "e": 1%s}' % ("0" * 300)
    assert json_text(fields) == expected


@pytest.mark.parametrize("text", ["\ud800", "é\ud800", "\ud83d"])
def test_a_lone_surrogate_is_escaped(text):
    line = json_text({"text": text, text: math.nan})
    assert line.isascii() and json.loads(line) == {"text": text, text: None}


def test_characters_stand_for_themselves_unless_ascii_is_wanted():
    assert json_text({"text": "é\n"}) == '{"text": "é\\n"}'
    assert json_text({"text": "é\n"}, ensure_ascii=True) == '{"text": "\\u00e9\\n"}'
    assert json_text({"a": [1]}, indent=1) == '{\n "a": [\n  1\n ]\n}'


def test_what_python_could_not_write_at_all_is_still_an_error():
    with pytest.raises(ValueError, match="limit"):
        json_text({"a": 10**5000})
