"""StreamDecoder: whole characters, nothing taken back, the same text as decode."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.text.stream_decoder import StreamDecoder, TextWindow
from dsbd_runtime.text.tokenizer import Tokenizer

TEXT = "x = 'é', naïve; 日本語 👩‍👩‍👧 ok 🏳️‍🌈!\n\tend"


@pytest.fixture
def byte_tokenizer(tiny_bundle: Bundle) -> Tokenizer:
    """One token a byte: every character beyond ASCII is split."""
    return Tokenizer.from_bundle(tiny_bundle)


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Tokenizer:
    """Like SentencePiece: the space belongs to the word, unknown characters are byte tokens."""
    words = ["<unk>", "▁Hello", "▁world", "lo", "!", "▁"]
    vocab = {word: index for index, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["</s>"])  # 262
    backend.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path, bos_token_id=None)


def pieces(tokenizer: Tokenizer, pushes: list[list[int]]) -> list[str]:
    decoder = StreamDecoder(TextWindow(tokenizer))
    return [*(decoder.push(ids) for ids in pushes), decoder.finish()]


def test_characters_come_whole_byte_by_byte(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode(TEXT)
    found = pieces(byte_tokenizer, [[token_id] for token_id in ids])
    assert "".join(found) == TEXT
    assert [piece for piece in found if piece] == list(TEXT)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(found)


@pytest.mark.parametrize("seed", range(5))
def test_any_grouping_gives_the_same_text(byte_tokenizer: Tokenizer, seed: int) -> None:
    ids = byte_tokenizer.encode(TEXT)
    cuts = sorted(np.random.default_rng(seed).integers(0, len(ids) + 1, 12).tolist())
    pushes = [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]
    found = pieces(byte_tokenizer, pushes)
    assert "".join(found) == TEXT
    for piece in found:
        assert piece in TEXT


def test_an_unfinished_character_comes_at_the_end_only(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("aé")
    assert pieces(byte_tokenizer, [ids[:2]]) == ["a", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_stream_to_what_decode_says(byte_tokenizer: Tokenizer, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, 258, 200).tolist()
    found = pieces(byte_tokenizer, [[token_id] for token_id in ids])
    assert "".join(found) == byte_tokenizer.decode(ids)
    assert max(len(piece) for piece in found) <= 4  # nothing is held back for long


def test_special_tokens_are_silent(byte_tokenizer: Tokenizer) -> None:
    a = byte_tokenizer.encode("a")[0]
    assert pieces(byte_tokenizer, [[256], [a], [257], [a], []]) == ["", "a", "", "a", "", ""]


WORDS = [
    # token ids, text pieces
    ([1, 2, 4], ["Hello", " world", "!", ""]),
    ([3, 2, 3], ["lo", " world", "lo", ""]),
    ([5, 5, 1], ["", " ", " Hello", ""]),
    ([1, 262, 2], ["Hello", "", " world", ""]),
    ([1, 6 + 0xC3, 6 + 0xA9, 2], ["Hello", "", "", "é world", ""]),
]


@pytest.mark.parametrize(("ids", "wanted"), WORDS)
def test_spaces_between_words_stay(
    word_tokenizer: Tokenizer, ids: list[int], wanted: list[str]
) -> None:
    found = pieces(word_tokenizer, [[token_id] for token_id in ids])
    assert found == wanted
    assert "".join(found) == word_tokenizer.decode(ids)


def test_a_finished_decoder_starts_afresh(byte_tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(TextWindow(byte_tokenizer))
    ids = byte_tokenizer.encode("é")
    assert decoder.push(ids[:1]) == ""
    assert decoder.finish() == "\N{REPLACEMENT CHARACTER}"
    assert decoder.push(byte_tokenizer.encode("ok")) == "ok"
    assert decoder.finish() == ""
