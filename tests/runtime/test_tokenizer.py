"""Tokenizer: text to ids and back, special tokens, and damaged files."""

import json

import pytest
from tokenizers import processors

from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.text.tokenizer import BYTE_BY_SYMBOL, Tokenizer
from tests.runtime.tiny_tokenizer import BOS, EOS, tiny_tokenizer
from tests.runtime.tokenizer_kinds import KINDS, SPECIAL, saved, with_piece
from tests.runtime.tokenizer_kinds import TEXTS as MANY_SCRIPTS

BOS_ID, EOS_ID = 256, 257
TEXTS = ["", "def f():\n    return 1\n", "日本語テキスト", "👩‍👩‍👧 ok 🏳️‍🌈", "\x00\x7f\r\n\t"]
TEXTS += ["naïve café\n" * 1000]


def saved_tokenizer(folder, *, has_template=False, config=None, truncates=False):
    backend = tiny_tokenizer()
    if has_template:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]
        )
    if truncates:
        backend.enable_truncation(4)
        backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(tiny_bundle, text):
    tokenizer = Tokenizer.from_bundle(tiny_bundle)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


ADD_BOS = [
    # template adds it, tokenizer_config.json, the manifest's id, what stands first
    (False, None, BOS_ID, []),
    (False, {}, BOS_ID, []),
    (False, {"add_bos_token": False}, BOS_ID, []),
    (False, {"add_bos_token": True}, BOS_ID, [BOS_ID]),
    (False, {"add_bos_token": True}, None, []),
    (True, {"add_bos_token": True}, BOS_ID, [BOS_ID]),
    (True, None, None, [BOS_ID]),
]


@pytest.mark.parametrize(("has_template", "config", "bos_token_id", "first"), ADD_BOS)
def test_a_bos_is_added_once_or_not_at_all(tmp_path, has_template, config, bos_token_id, first):
    saved_tokenizer(tmp_path, has_template=has_template, config=config)
    tokenizer = Tokenizer(tmp_path, bos_token_id=bos_token_id)
    plain = tokenizer.encode("ab", add_special_tokens=False)
    assert len(plain) == 2
    assert tokenizer.encode("ab") == [*first, *plain]


def test_special_tokens_are_read_but_not_written_and_truncation_is_ignored(tmp_path):
    tokenizer = Tokenizer(saved_tokenizer(tmp_path, truncates=True), bos_token_id=BOS_ID)
    ids = tokenizer.encode(f"{BOS}a{EOS}")
    assert (ids[0], ids[-1]) == (BOS_ID, EOS_ID)
    assert tokenizer.decode(ids) == "a"
    assert len(tokenizer.encode("a" * 100)) == 100
    assert len(tokenizer.encode("a")) == 1


def test_a_lone_surrogate_is_named(tiny_bundle):
    tokenizer = Tokenizer.from_bundle(tiny_bundle)
    with pytest.raises(InputError, match=r"lone surrogate U\+D83D at index 2"):
        tokenizer.encode("ab\ud83d")


WHOLE = tiny_tokenizer().to_str(pretty=True).encode()
DAMAGED = [b"", b"{", b"hello", b"{}", b"\xff", b'{"model": {"type": "BPE"}}', b"[" * 100_000]
DAMAGED += [None, *(WHOLE[:size] for size in (100, 1000, 3000))]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_or_missing_tokenizer_is_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BundleError, match=r"tokenizer\.json is not a tokenizer") as caught:
        Tokenizer(tmp_path, bos_token_id=None)
    assert "\n" not in str(caught.value)
    saved_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(BundleError, match=r"tokenizer_config\.json cannot be read as JSON"):
        Tokenizer(tmp_path, bos_token_id=BOS_ID)


OWN_BYTES = [
    # kind of tokenizer, token, its bytes, its name
    ("byte_level", "Ġdef", b" def", " def"),
    ("byte_level", "Ł", b"\x9f", "\\x9f"),
    ("byte_level", "âĤ", b"\xe2\x82", "\\xe2\\x82"),
    ("byte_level", "ï¿½", b"\xef\xbf\xbd", "\N{REPLACEMENT CHARACTER}"),
    ("byte_level", "日本", "日本".encode(), "日本"),  # no symbols of bytes: added by its text
    ("byte_level", SPECIAL, SPECIAL.encode(), SPECIAL),
    ("strip", "▁the", b" the", " the"),
    ("strip", "▁", b" ", " "),
    ("strip", "<0x9F>", b"\x9f", "\\x9f"),
    ("strip", "<0x41>", b"A", "A"),
    ("strip", SPECIAL, SPECIAL.encode(), SPECIAL),
    ("metaspace", "▁the", b" the", " the"),
    ("metaspace", "<0x9F>", b"<0x9F>", "<0x9F>"),  # this decoder knows no bytes
    ("word_piece", "the", b" the", " the"),
    ("word_piece", "##ing", b"ing", "ing"),
]


@pytest.mark.parametrize(("kind", "piece", "content", "name"), OWN_BYTES)
def test_own_bytes_of_a_token(tmp_path, kind, piece, content, name):
    tokenizer = saved(with_piece(kind, piece), tmp_path)
    for each in (tokenizer, tokenizer.with_special_tokens):
        assert (each.bytes_of(0), each.name_of(0)) == (content, name)
    assert (tokenizer.bytes_of(99), tokenizer.name_of(99)) == (b"", "<99>")


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"across_tokens", "stripped_at_the_end"}))
def test_own_bytes_join_to_the_text_between_others(tmp_path, kind):
    tokenizer = saved(KINDS[kind](), tmp_path)
    letter = tokenizer.letter
    for text in MANY_SCRIPTS:
        ids = [letter, *tokenizer.encode(text), letter]
        joined = b"".join(map(tokenizer.bytes_of, ids)).decode(errors="replace")
        assert joined.strip() == tokenizer.with_special_tokens.decode(ids).strip()


def test_byte_symbols_are_those_of_the_library(tiny_bundle):
    tokenizer = Tokenizer.from_bundle(tiny_bundle)
    assert len(BYTE_BY_SYMBOL) == 256 == len(set(BYTE_BY_SYMBOL.values()))
    for text in ("é", "\x00 \xad", "日本"):
        pieces = [tokenizer.piece(i) for i in tokenizer.encode(text)]
        assert bytes(BYTE_BY_SYMBOL[symbol] for symbol in "".join(pieces)) == text.encode()


@pytest.mark.parametrize("piece", ["<|sound|>", SPECIAL])  # the second in many vocabularies
@pytest.mark.parametrize("kind", KINDS)
def test_a_renamed_special_token_is_text_by_its_old_name(tmp_path, kind, piece):
    backend = KINDS[kind]()
    backend.add_special_tokens([piece, "<|other|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path, bos_token_id=None)
    [token], [other] = (
        tokenizer.encode(each, add_special_tokens=False) for each in (piece, "<|other|>")
    )
    renamed = tokenizer.with_renamed(piece, "0123456789")
    ids = renamed.encode("a0123456789<|other|>a", add_special_tokens=False)
    assert ids == tokenizer.encode(f"a{piece}<|other|>a", add_special_tokens=False)
    assert ids.count(token) == ids.count(other) == 1
    assert token not in renamed.encode(f"a {piece}", add_special_tokens=False)
    assert tokenizer.encode(piece, add_special_tokens=False) == [token]
