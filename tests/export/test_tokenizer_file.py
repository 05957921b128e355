"""Files of a tokenizer: which are written, and from which older ones tokenizer.json is built."""

# ruff: noqa: RUF001 - wide letters, which are read as others

import base64
import importlib.util
import io
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import regex
import sentencepiece
from tokenizers import Tokenizer as Backend
from transformers import BertJapaneseTokenizer

from dsbd_export.errors import ExportError
from dsbd_export.tokenizers.older_tokenizers import character_tokenizer, is_of_characters
from dsbd_export.tokenizers.tokenizer_files import highest_token_id, read_tokenizer
from dsbd_runtime.text.tokenizer import BYTE_BY_SYMBOL, Tokenizer
from tests.export.conftest import opened, write_merges, written_tokenizer
from tests.tokenizer_corpus import byte_level_model, random_texts, training_texts

TEXT = "def read(path): return path"


@pytest.fixture
def checkpoint(llama_folder, tmp_path):
    return opened(shutil.copytree(llama_folder, tmp_path / "checkpoint"))


@pytest.fixture
def slow_checkpoint(checkpoint):
    """The same tokenizer as vocab.json and merges.txt, as GPT-2 came."""
    file = checkpoint.folder / "tokenizer.json"
    model = json.loads(file.read_text())["model"]
    file.unlink()
    (checkpoint.folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    write_merges(checkpoint.folder, model["merges"])
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>", "unk_token": "<|end|>"}
    (checkpoint.folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return checkpoint


def test_files_are_written(checkpoint, tmp_path):
    (checkpoint.folder / "chat_template.jinja").write_text("{{ messages }}é\n", encoding="utf-8")
    output = tmp_path / "bundle"
    written_tokenizer(checkpoint, output)
    assert {file.name for file in output.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    }
    for name in ("generation_config.json", "chat_template.jinja"):
        assert (output / name).read_bytes() == (checkpoint.folder / name).read_bytes()
    assert read_tokenizer(checkpoint) == json.loads((output / "tokenizer.json").read_text())


def test_a_slow_tokenizer_becomes_a_file(slow_checkpoint, llama_folder, tmp_path):
    output = tmp_path / "bundle"
    written_tokenizer(slow_checkpoint, output)
    built = Backend.from_file(str(output / "tokenizer.json"))
    wanted = Backend.from_file(str(llama_folder / "tokenizer.json"))
    assert built.encode(TEXT).ids == wanted.encode(TEXT).ids
    assert built.decode(built.encode(TEXT).ids) == TEXT
    assert read_tokenizer(slow_checkpoint) == json.loads((output / "tokenizer.json").read_text())


def test_a_broken_file_or_none_at_all(checkpoint):
    for text, words in BROKEN:
        (checkpoint.folder / "tokenizer.json").write_text(text)
        with pytest.raises(ExportError, match=words):
            read_tokenizer(checkpoint)
    (checkpoint.folder / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match=r"no .*tokenizer\.json and none of vocab\.json.*copy"):
        read_tokenizer(checkpoint)


def test_files_that_are_no_tokenizer(slow_checkpoint):
    (slow_checkpoint.folder / "vocab.json").write_text("[")
    with pytest.raises(ExportError, match="transformers cannot load the tokenizer of the target"):
        read_tokenizer(slow_checkpoint)


BROKEN = [
    ("{", "is invalid JSON"),
    ("[]", "no section 'model'"),
    ('{"model": 3}', "no section 'model'"),
]


HIGHEST = [  # (content of tokenizer.json, id)
    ({"model": {"vocab": {"a": 0, "b": 7}}}, 7),
    ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 9, "content": "<x>"}]}, 9),
    ({"model": {"vocab": [["a", 0.0], ["b", -1.5]]}}, 1),
    ({"model": {}}, -1),
]


def test_the_highest_token_id():
    for content, wanted in HIGHEST:
        assert highest_token_id(content) == wanted


WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN_TOKENS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
NUM_SPECIAL = 20  # with reserved ones
LLAMA: dict[str, Any] = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 700}))
    return folder


def export(folder: Path) -> tuple[Tokenizer, list[str]]:
    return written_tokenizer(opened(folder), folder.parent / "bundle")


def configure(folder: Path, **settings: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def tokens_by_rank() -> list[bytes]:
    vocab = byte_level_model()["vocab"]
    return [bytes(map(BYTE_BY_SYMBOL.__getitem__, token)) for token in sorted(vocab, key=vocab.get)]


def write_tekken(folder: Path) -> None:
    tokens = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens_by_rank())
    ]
    special = [
        {"rank": rank, "token_str": token, "is_control": True}
        for rank, token in enumerate(TEKKEN_TOKENS)
    ]
    config = {
        "pattern": WORDS,
        "default_vocab_size": len(tokens) + NUM_SPECIAL,
        "default_num_special_tokens": NUM_SPECIAL,
    }
    content = {"config": config, "vocab": tokens, "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(content))


def write_tiktoken(folder: Path, name: str) -> None:
    lines = [
        b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens_by_rank())
    ]
    (folder / name).write_bytes(b"".join(lines))


def write_vocab_and_merges(folder: Path) -> None:
    model = byte_level_model()
    vocab = model["vocab"] | {"<|endoftext|>": len(model["vocab"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    write_merges(folder, model["merges"])


def write_sentencepiece(folder: Path, kind: str, **options: Any) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(text for text in training_texts() if text.strip()),
        model_writer=model,
        model_type=kind,
        vocab_size=450,
        byte_fallback=True,
        character_coverage=0.99,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())


def ids_by_rank(text: str, first: int) -> list[int]:
    """Return the ids by joining, in each word, the two neighbours whose join has the lowest rank.

    first: the id of rank 0.
    """
    rank_by_token = {token: rank for rank, token in enumerate(tokens_by_rank())}
    ids: list[int] = []
    for word in regex.findall(WORDS, text):
        parts = [bytes((byte,)) for byte in word.encode()]
        while True:
            joins = [
                (rank_by_token[a + b], i)
                for i, (a, b) in enumerate(itertools.pairwise(parts))
                if a + b in rank_by_token
            ]
            if not joins:
                break
            _, i = min(joins)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [first + rank_by_token[part] for part in parts]
    return ids


def test_tekken(folder):
    write_tekken(folder)
    tokenizer, lines = export(folder)
    for text in random_texts(40):
        assert tokenizer.encode(text, add_special_tokens=False) == ids_by_rank(text, NUM_SPECIAL)
    bos, inst = TEKKEN_TOKENS.index("<s>"), TEKKEN_TOKENS.index("[INST]")
    assert tokenizer.encode("[INST]")[:2] == [bos, inst]
    config = json.loads((folder.parent / "bundle" / "tokenizer_config.json").read_text())
    named = {name: config.get(f"{name}_token") for name in ("bos", "eos", "unk", "pad")}
    assert named == {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": None}
    (line,) = lines
    assert "has no chat template" in line and "chat_template.jinja" in line


def test_tekken_with_its_own_settings_and_template(folder):
    write_tekken(folder)
    configure(folder, bos_token="[INST]", add_bos_token=False)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    tokenizer, lines = export(folder)
    assert tokenizer.encode("Hello") == tokenizer.encode("Hello", add_special_tokens=False)
    assert not [line for line in lines if "chat template" in line]


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model", "qwen.tiktoken"])
@pytest.mark.parametrize("kind", ["LlamaTokenizer", "Qwen2Tokenizer"])
def test_tiktoken_is_refused_by_name(folder, name, kind):
    write_tiktoken(folder, name)
    configure(folder, tokenizer_class=kind)
    with pytest.raises(ExportError, match=rf"{name}, a tiktoken file, .*tokenizer\.json is needed"):
        export(folder)


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_vocab_and_merges_by_their_class(folder, kind):
    write_vocab_and_merges(folder)
    configure(folder, tokenizer_class=kind)
    tokenizer, _ = export(folder)
    text = "Hello, world! 日本 1"
    assert tokenizer.decode(tokenizer.encode(text)) == text


CLASSES = [  # (settings, words)
    ({"tokenizer_class": "LlamaTokenizer"}, r"as \[\], which is ''.*set tokenizer_class"),
    ({}, r"cannot load the tokenizer .*the tokenizer_class that tokenizer_config\.json names"),
]


@pytest.mark.parametrize(("settings", "words"), CLASSES)
def test_vocab_and_merges_by_another_class(folder, settings, words):
    write_vocab_and_merges(folder)
    configure(folder, **settings)
    with pytest.raises(ExportError, match=words):
        export(folder)


IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
SENTENCEPIECE = [  # (kind, options of the training, settings)
    ("bpe", IDENTITY, LLAMA | {"add_bos_token": True}),
    ("bpe", IDENTITY, LLAMA | {"legacy": False}),
    ("bpe", {}, {}),
    ("unigram", {}, LLAMA),
    ("unigram", IDENTITY | {"add_dummy_prefix": False}, {}),
]


@pytest.mark.parametrize(("kind", "options", "settings"), SENTENCEPIECE)
def test_sentencepiece(folder, kind, options, settings):
    write_sentencepiece(folder, kind, **options)
    configure(folder, **settings)
    tokenizer, _ = export(folder)
    wanted = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for text in training_texts():
        plain = text.strip().replace("a\u0308\u0323", "")
        assert tokenizer.encode(plain, add_special_tokens=False) == wanted.encode(plain)
    begins = [wanted.bos_id()] * settings.get("add_bos_token", False)
    assert tokenizer.encode("x") == [*begins, *wanted.encode("x")]


def test_what_tokenizers_cannot_do_is_refused(folder):
    write_sentencepiece(folder, "bpe", treat_whitespace_as_suffix=True)
    with pytest.raises(ExportError, match=r"built from .*tokenizer\.model it reads .*converted"):
        export(folder)


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CHARACTERS = "こんにちは世界、!。Ａabc漫画のﾊﾟ…パ12３"
CHARACTER_TEXTS = (
    "こんにちは世界",
    "漫画、の 世界 !",
    "ａｂｃ ＡＢＣ １２３",
    "ﾊﾟパ…。",
    "知らない\u3000字 abc\t12",
    "[MASK]の[SEP]",
    "",
)


def with_characters(folder, word_tokenizer, **more):
    tokens = list(dict.fromkeys([*SPECIAL, *CHARACTERS, "##a", "…"]))
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), "utf-8")
    settings = {
        "tokenizer_class": "BertJapaneseTokenizer",
        "word_tokenizer_type": word_tokenizer,
        "subword_tokenizer_type": "character",
        **more,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return folder


def check_characters(folder, texts):
    assert is_of_characters(folder)
    ours, theirs = character_tokenizer(folder), BertJapaneseTokenizer.from_pretrained(folder)
    for text in texts:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        for skips in (True, False):
            written = [each.decode(ids, skip_special_tokens=skips) for each in (ours, theirs)]
            assert written[0] == written[1]
    every = list(range(len(theirs)))
    assert ours.decode(every) == theirs.decode(every)


def test_words_of_spaces_and_punctuation(tmp_path):
    """Transformers' own splitter normalizes nothing."""
    plain = [text for text in CHARACTER_TEXTS if not set(text) & set("ａＡ１ﾊ…\u3000")]
    assert len(plain) == 4
    check_characters(with_characters(tmp_path, "basic"), plain)


@pytest.mark.skipif(not importlib.util.find_spec("fugashi"), reason="MeCab is not installed")
@pytest.mark.parametrize("lower", [False, True])
def test_words_of_mecab(lower, tmp_path):
    check_characters(with_characters(tmp_path, "mecab", do_lower_case=lower), CHARACTER_TEXTS)


def test_other_tokenizers_of_bert_are_not_of_characters(tmp_path):
    assert not is_of_characters(
        with_characters(tmp_path, "basic", subword_tokenizer_type="wordpiece")
    )
    assert not is_of_characters(with_characters(tmp_path, "basic", tokenizer_class="BertTokenizer"))
