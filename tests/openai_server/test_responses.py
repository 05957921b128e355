"""Texts of single tokens: together the text, each character at the token that completes it."""

import numpy as np

from dsbd_ort.openai_server.responses import TokenTexts
from dsbd_runtime.text.stream_decoder import REPLACEMENT, TextWindow
from tests.runtime.tokenizer_kinds import TEXTS


def pushed(tokenizer, groups):
    """The pieces of every push and of the end, each a list of texts."""
    texts, logprob, pieces = TokenTexts(TextWindow(tokenizer)), 0.0, []
    for group in groups:
        logprobs = [logprob - index for index in range(len(group))]
        logprob -= len(group)
        pieces.append(texts.push(group, logprobs))
    pieces.append(texts.finish())
    found = [each.logprob for piece in pieces if piece for each in piece.tokens]
    assert found == [-float(index) for index in range(len(found))]
    return [list(piece.texts) if piece else [] for piece in pieces]


def test_texts_of_tokens_are_the_text(any_tokenizer):
    tokenizer = any_tokenizer
    rng = np.random.default_rng(0)
    random_ids = [rng.integers(0, tokenizer.vocab_size + 1, 30).tolist() for _ in range(20)]
    for ids in (*map(tokenizer.encode, TEXTS), *random_ids):
        for groups in ([[i] for i in ids], [ids], [ids[:3], ids[3:]]):
            texts = [text for piece in pushed(tokenizer, groups) for text in piece]
            assert "".join(texts) == tokenizer.decode(ids) and len(texts) == len(ids)


def test_a_character_belongs_to_the_token_that_completes_it(llama_2):
    ids = llama_2.encode("aé😀 b")
    texts = [text for piece in pushed(llama_2, [ids]) for text in piece]
    assert texts == ["a", "é", "", "", "", "😀", " b"]


def test_tokens_of_a_run_of_bytes_wait_for_its_end(llama_2):
    a, _, *emoji, b = llama_2.encode("aé😀 b")
    assert pushed(llama_2, [[a], emoji, [b]]) == [["a"], [], ["", "", "", "😀", " b"], []]
    assert pushed(llama_2, [[a], emoji]) == [["a"], [], ["", "", "", "😀"]]
    assert pushed(llama_2, [emoji[:2], [b]]) == [[], [REPLACEMENT, REPLACEMENT, " b"], []]
    assert pushed(llama_2, [emoji[:2]]) == [[], [REPLACEMENT, REPLACEMENT]]
    assert pushed(llama_2, [emoji[:2], emoji]) == [[], [REPLACEMENT] * 6, []]
