"""StreamDecoder over every kind of tokenizer: its pieces are ``decode``, for any tokens."""

import itertools

import numpy as np
import pytest

from dsbd_runtime.text.stream_decoder import REPLACEMENT, StreamDecoder, TextWindow, whole_text
from tests.runtime.tokenizer_kinds import SPECIAL, TEXTS

NOT_STREAMED = {"across_tokens", "stripped_at_the_end"}


def streamed(tokenizer, groups):
    decoder = StreamDecoder(TextWindow(tokenizer))
    return [*(decoder.push(group) for group in groups), decoder.finish()]


def random_texts(rng):
    """Texts of pieces of TEXTS, of one alphabet or mixed, and of any characters."""
    for _ in range(60):
        pieces = []
        for _ in range(rng.integers(1, 6)):
            text = TEXTS[rng.integers(len(TEXTS))]
            begin = int(rng.integers(len(text)))
            pieces.append(text[begin : begin + int(rng.integers(1, 9))])
        yield "".join(pieces)
        codes = [*rng.integers(1, 0xD800, 3), *rng.integers(0xE000, 0x110000, 5)]
        yield "".join(chr(int(code)) for code in codes)


@pytest.mark.parametrize("seed", range(24))
def test_any_tokens_stream_to_what_decode_says(any_tokenizer, seed):
    """Invalid bytes, special tokens, ids outside the vocabulary, few tokens many times."""
    rng = np.random.default_rng(seed)
    vocab_size = any_tokenizer.vocab_size
    chosen = rng.integers(0, vocab_size + 2, int(rng.choice([2, 4, 12, 200])))
    ids = rng.choice(chosen, 40).tolist()
    if any_tokenizer.byte_of(vocab_size // 2) is not None and seed % 2:  # mostly bytes
        valid = any_tokenizer.encode("é😀日")
        ids = [token for i in ids for token in (valid if rng.random() < 0.7 else [i])]
    found = streamed(any_tokenizer, [[i] for i in ids])
    assert "".join(found) == any_tokenizer.decode(ids)


def test_pieces_are_never_taken_back_whatever_follows(any_tokenizer):
    rng = np.random.default_rng(1)
    ids = [*any_tokenizer.encode("é😀 a日本"), *rng.integers(0, any_tokenizer.vocab_size, 8)]
    window, given = TextWindow(any_tokenizer), ""
    for end in range(len(ids)):
        window, piece = window.extended(ids[end : end + 1])
        given += piece
        for _ in range(10):
            later = rng.integers(0, any_tokenizer.vocab_size, 4).tolist()
            branch, piece = window.extended(later)
            whole = any_tokenizer.decode([*ids[: end + 1], *later])
            assert given + piece + branch.rest() == whole


def continued(tokenizer, ids, cut):
    """Return the text before a cut, that which is streamed after it, and where that begins."""
    start = TextWindow.after(tokenizer, ids[:cut])
    decoder = StreamDecoder(start)
    pieces = [*(decoder.push([token]) for token in ids[cut:]), decoder.finish()]
    return whole_text(tokenizer, ids[:cut]), "".join(pieces), start


def test_a_text_is_streamed_as_decode_says_whole_and_after_its_beginning(any_tokenizer):
    rng = np.random.default_rng(2)
    for text in random_texts(rng):
        ids = any_tokenizer.encode(text)
        cuts = [0, *sorted(rng.integers(0, len(ids) + 1, 3).tolist()), len(ids)]
        groups = [ids[start:stop] for start, stop in itertools.pairwise(cuts)]
        assert "".join(streamed(any_tokenizer, groups)) == any_tokenizer.decode(ids)
        for cut in cuts[:-1]:
            before, added, start = continued(any_tokenizer, ids, cut)
            assert before + added == any_tokenizer.decode(ids)
            assert added == start.text_of(ids[cut:])
            alone = any_tokenizer.decode(ids[:cut])
            assert before == alone or alone.endswith(REPLACEMENT)


@pytest.mark.parametrize("seed", range(12))
def test_any_tokens_continue_any_others(any_tokenizer, seed):
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, any_tokenizer.vocab_size + 2, int(rng.choice([2, 4, 12, 200])))
    ids = rng.choice(chosen, 40).tolist()
    for cut in range(0, 40, 3):
        before, added, start = continued(any_tokenizer, ids, cut)
        assert added == start.text_of(ids[cut:])
        whole = any_tokenizer.decode(ids)
        if whole.startswith(before):  # else bytes of the prompt became invalid
            assert before + added == whole


def test_the_work_does_not_grow_with_the_prompt(tokenizer_kind, any_tokenizer):
    if tokenizer_kind in NOT_STREAMED:
        return  # any later token may change all of it
    ids = any_tokenizer.encode("Hello world é") * 1000
    for token_id in set(ids):
        any_tokenizer.adds_text(token_id)
        any_tokenizer.bytes_of(token_id)
    before = any_tokenizer.num_decoded
    decoder = StreamDecoder(TextWindow.after(any_tokenizer, ids))
    assert any_tokenizer.num_decoded - before <= 4 * MOST_PER_TOKEN
    before = any_tokenizer.num_decoded
    for token_id in ids[:50]:
        decoder.push([token_id])
    assert any_tokenizer.num_decoded - before <= 50 * MOST_PER_TOKEN


def test_characters_of_the_prompt_stay_where_a_new_byte_is_invalid(llama_2):
    prompt, letter = byte_tokens(llama_2, "é😀".encode()), llama_2.encode("a")[-1]
    for begun, new in (((), b"\xff"), (prompt[:1], b""), (prompt[2:4], b"\xff")):
        ids = [*prompt, *begun, *byte_tokens(llama_2, new)]
        before, added, _ = continued(llama_2, [*ids, letter], len(prompt) + len(begun))
        assert (before, added) == ("é😀", REPLACEMENT * (len(begun) + len(new)) + " a")
    before, added, _ = continued(llama_2, [*prompt, *prompt, letter], len(prompt) + 1)
    assert (before, added) == ("é😀", "é😀 a")


ENDLESS = ["a", " ", "é", "😀", "\n", "日本語", "\N{REPLACEMENT CHARACTER}"]
MOST_PER_TOKEN = 16  # decoded tokens a pushed one


def decoded_per_token(tokenizer, ids):
    """Push one by one; return how many tokens were decoded for each, those of finish as well."""
    for token_id in set(ids):
        tokenizer.adds_text(token_id)  # found out once a token
    before = tokenizer.num_decoded
    streamed(tokenizer, [[token_id] for token_id in ids])
    return (tokenizer.num_decoded - before) / len(ids)


@pytest.mark.parametrize("text", ENDLESS)
def test_work_is_linear_in_endless_text(any_tokenizer, text):
    ids = any_tokenizer.encode(text * 50) * 6
    assert not ids or decoded_per_token(any_tokenizer, ids) <= MOST_PER_TOKEN


@pytest.mark.parametrize("seed", range(8))
def test_work_is_linear_in_endless_tokens_of_few_kinds(any_tokenizer, seed):
    """One or two tokens for ever: invalid bytes, a begun character, special ones, spaces."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, any_tokenizer.vocab_size + 2, int(rng.integers(1, 3)))
    ids = rng.choice(chosen, 1000).tolist()
    assert decoded_per_token(any_tokenizer, ids) <= MOST_PER_TOKEN
    assert "".join(streamed(any_tokenizer, [[i] for i in ids])) == any_tokenizer.decode(ids)


def test_text_is_not_held_back_for_long(tokenizer_kind, any_tokenizer):
    ids = any_tokenizer.encode("Hello world")
    given = "".join(streamed(any_tokenizer, [[i] for i in ids])[:-1])
    assert given == ("" if tokenizer_kind in NOT_STREAMED else any_tokenizer.decode(ids))


def byte_tokens(tokenizer, content):
    id_by_piece = {tokenizer.piece(i): i for i in range(tokenizer.vocab_size)}
    return [id_by_piece[f"<0x{byte:02X}>"] for byte in content]


RUNS = [
    # bytes one by one, the text given with each, the text of the end
    ("é😀".encode(), ["", "", "", "", "", ""], "é😀"),
    ("é".encode() + b"\xf0\x9f", ["", "", "", ""], REPLACEMENT * 4),
    ("é".encode() + b"\xff" + b"ab", ["", "", REPLACEMENT * 3, REPLACEMENT, REPLACEMENT], ""),
    (b"\x80\x80", [REPLACEMENT, REPLACEMENT], ""),
    (b"\xc3a\xc3\xa9", ["", REPLACEMENT * 2, REPLACEMENT, REPLACEMENT], ""),
    (b"\xed\xa0\x80", ["", "", REPLACEMENT * 3], ""),  # a surrogate
]


@pytest.mark.parametrize(("content", "given", "rest"), RUNS)
def test_a_run_of_bytes_is_certain_when_it_ends_or_never_can_be_text(llama_2, content, given, rest):
    ids = byte_tokens(llama_2, content)
    assert streamed(llama_2, [[i] for i in ids]) == [*given, rest]
    assert streamed(llama_2, [[i] for i in ids[:-1]])[:-1] == given[:-1]


def test_a_special_token_does_not_end_a_run(llama_2):
    special = llama_2.encode(SPECIAL)[-1]
    first, second = byte_tokens(llama_2, "é".encode())
    letter = llama_2.encode("a")[-1]
    found = streamed(llama_2, [[first], [special], [second], [special], [letter]])
    assert found == ["", "", "", "", "é a", ""]


@pytest.mark.parametrize("num_characters", [1, 2, 5])
def test_the_end_of_a_held_text_is_decoded_alone(llama_2, num_characters):
    text = "é日😀" * 100
    window, _ = TextWindow(llama_2).extended(byte_tokens(llama_2, text.encode()))
    before = llama_2.num_decoded
    end = window.end_of_rest(num_characters)
    assert len(end) >= num_characters and text.endswith(end)
    assert llama_2.num_decoded - before <= 4 * num_characters
    assert window.rest() == text


def test_a_finished_decoder_starts_afresh(any_tokenizer):
    decoder = StreamDecoder(TextWindow(any_tokenizer))
    for text in ("é", "ok"):
        ids = any_tokenizer.encode(text)
        assert decoder.push(ids) + decoder.finish() == any_tokenizer.decode(ids)
