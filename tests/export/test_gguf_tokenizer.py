"""The tokenizer of a GGUF file gives the ids of llama.cpp, or the file is refused by name."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import pytest

from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_pair
from dsbd_export.tokenizers.gguf_tokenizer import gguf_tokenizer
from dsbd_export.tokenizers.gguf_words import PRE_TOKENIZERS
from dsbd_runtime.text.tokenizer import Tokenizer
from tests.clients.environments import llama_cpp_ids
from tests.export.conftest import written_tokenizer
from tests.export.gguf_vocabularies import (
    ACCENTED,
    BEGIN,
    DEEPSEEK,
    SPACES,
    TEXTS,
    THINK,
    Vocabulary,
    byte_level,
    of_characters,
    write_vocabulary,
)
from tests.export.llama_cpp_ids import CASES, JUDGED, NAMES, made_table, table, vocabulary_of
from tests.tokenizer_corpus import random_texts

MARKS = "e\u0301a\u0323"
# llama.cpp has no expression for marks: it comes near the one of the tokenizer.json, which it
# quotes, which transformers has as well, and which is read here.
WITH_MARKS = ("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")
ALIKE = [name for name in NAMES if name not in WITH_MARKS]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "m.gguf"


def ids_of(file: Path, vocabulary: Vocabulary, text: str) -> list[int]:
    found: list[int] = gguf_tokenizer(write_vocabulary(file, vocabulary)).encode(text)
    return found


def written(file: Path, folder: Path) -> tuple[Tokenizer, list[str]]:
    return written_tokenizer(open_pair(ExportConfig(target=str(file), output=folder))[0], folder)


def with_tokens(
    vocabulary: Vocabulary, tokens: str, kind: int = gguf.TokenType.NORMAL
) -> Vocabulary:
    assert vocabulary.kinds is not None
    added = tokens.split()
    kinds = [*vocabulary.kinds, *[kind] * len(added)]
    return dataclasses.replace(vocabulary, tokens=[*vocabulary.tokens, *added], kinds=kinds)


def refusal(file: Path, vocabulary: Vocabulary) -> str:
    with pytest.raises(ExportError) as caught:
        gguf_tokenizer(write_vocabulary(file, vocabulary))
    return str(caught.value)


@pytest.mark.parametrize("case", [*NAMES, *CASES])
def test_ids_are_those_of_llama_cpp(file, case):
    tokenizer = gguf_tokenizer(write_vocabulary(file, vocabulary_of(case)))
    for text, wanted in zip(JUDGED, table()[case], strict=True):
        if case not in WITH_MARKS or text != MARKS:
            assert tokenizer.encode(text) == wanted, text


@pytest.mark.parametrize("name", WITH_MARKS)
def test_marks_belong_to_the_letter_before(file, name):
    vocabulary = byte_level(pre=name, add_bos_token=False)
    [word] = ids_of(file, vocabulary, MARKS)
    assert vocabulary.tokens[word] == "e\u00cc\u0123a\u00cc\u00a3"


@pytest.mark.clients
def test_the_table_is_what_llama_cpp_says():
    assert made_table() == table()


@pytest.mark.clients
@pytest.mark.parametrize("name", ALIKE)
def test_random_texts_are_read_as_by_llama_cpp(file, tmp_path, name):
    learnt = random_texts(12, seed=NAMES.index(name))
    write_vocabulary(file, byte_level(learnt, pre=name))
    texts = [*learnt, *random_texts(100, seed=1, tokens=(DEEPSEEK, THINK, BEGIN))]
    tokenizer = gguf_tokenizer(file)
    for text, wanted in zip(texts, llama_cpp_ids(file, texts, tmp_path), strict=True):
        assert tokenizer.encode(text) == wanted, text


@pytest.mark.parametrize("name", ["llama-bpe", "default", "deepseek-v3"])
def test_the_runtime_reads_the_same(file, tmp_path, name):
    write_vocabulary(file, byte_level(pre=name))
    runtime, _ = written(file, tmp_path / "bundle")
    assert [runtime.encode(text) for text in JUDGED] == table()[name]


@pytest.mark.parametrize("case", ["sentencepiece", "sentencepiece without a space"])
def test_texts_of_characters_come_back(file, tmp_path, case):
    runtime, _ = written(write_vocabulary(file, CASES[case]), tmp_path / "bundle")
    for text in (text for text in TEXTS if SPACES not in text):
        ids = runtime.encode(text, add_special_tokens=False)
        assert runtime.decode(ids) == text


def test_tokens_beyond_ascii_are_tokens_and_come_back(file, tmp_path):
    vocabulary = byte_level(pre="deepseek-v3")
    runtime, _ = written(write_vocabulary(file, vocabulary), tmp_path / "bundle")
    deepseek, accented = (vocabulary.tokens.index(token) for token in (DEEPSEEK, ACCENTED))
    ids = runtime.encode(f"{DEEPSEEK}{ACCENTED}")
    assert ids == [deepseek, accented]
    assert runtime.decode(ids) == ACCENTED  # the other one is a control token
    assert runtime.decode(runtime.encode("\u00e9")) == "\u00e9"


def test_a_word_of_the_vocabulary_is_its_token_for_llama_3_alone(file):
    lengths = {}
    for name in ("llama-bpe", "tekken", "qwen2"):
        vocabulary = byte_level(pre=name, add_bos_token=False)
        lengths[name] = len(ids_of(file, with_tokens(vocabulary, "xyzzy"), "xyzzy"))
    assert lengths == {"llama-bpe": 1, "tekken": 1, "qwen2": 5}


def test_tokens_that_files_call_plain_are_control_tokens(file):
    vocabulary = with_tokens(byte_level(pre="qwen2"), "<|im_end|>")
    assert ids_of(file, vocabulary, "<|im_end|>") == [len(vocabulary.tokens) - 1]


CONTROL = gguf.TokenType.CONTROL
ENDS: list[tuple[str, int, dict[str, int], str]] = [
    # further tokens, their kind, fields by the place of a further token; ends after the eos
    (
        "<|im_start|> <|im_end|> <|endoftext|> <|fim_prefix|> <|fim_suffix|> <|fim_middle|> "
        "<|fim_pad|> <|repo_name|> <|file_sep|> <|fim_repo|>",
        CONTROL,
        {"eos": 1, "padding": 2},
        "<|im_end|> <|endoftext|> <|fim_pad|> <|file_sep|> <|fim_repo|>",  # one name of a place
    ),
    ("<|im_end|> <|endoftext|>", gguf.TokenType.NORMAL, {}, "<|im_end|> <|endoftext|>"),
    ("<a> <|fim_pad|> <b>", CONTROL, {"eot": 0, "fim_pad": 2}, "<a> <b>"),
    ("<|fim_pad|>", CONTROL, {"fim_pad": 2**31}, "<|fim_pad|>"),
    ("</s>", CONTROL, {}, "</s>"),
    ("</s> <eos>", gguf.TokenType.NORMAL, {}, "<eos>"),  # a tag of HTML
    ("</s> <eos>", gguf.TokenType.USER_DEFINED, {}, "<eos>"),
    ("</s> <eos> <turn|> <|tool_response>", CONTROL, {}, "<eos> <turn|> <|tool_response>"),
    ("<|end|> <|endoftext|>", CONTROL, {}, "<|end|> <|endoftext|>"),  # Phi-3
    ("<|end|> <|return|> <|call|>", CONTROL, {}, "<|return|> <|call|>"),  # gpt-oss
    ("<|end|> <|flush|> <|calls|>", CONTROL, {}, "<|flush|> <|calls|>"),  # Solar Open
    ("<|end|> <|return|>", CONTROL, {}, "<|end|> <|return|>"),
    ("<a> <b>", CONTROL, {}, ""),
]


@pytest.mark.parametrize(("tokens", "kind", "places", "ends"), ENDS)
def test_an_answer_also_ends_at_tokens_that_llama_cpp_knows_by_their_texts(
    file, tmp_path, tokens, kind, places, ends
):
    plain = byte_level(pre="qwen2")
    for name, place in places.items():
        plain.fields[f"tokenizer.ggml.{name}_token_id"] = len(plain.tokens) + place
    vocabulary = with_tokens(plain, tokens, kind)
    write_vocabulary(file, vocabulary)
    checkpoint, _ = open_pair(ExportConfig(target=str(file), output=tmp_path / "bundle"))
    eos = plain.fields["tokenizer.ggml.eos_token_id"]
    found = [vocabulary.tokens[index] for index in checkpoint.eos_token_ids]
    assert found == list(dict.fromkeys([vocabulary.tokens[eos], *ends.split()]))
    named = {eos, plain.fields.get("tokenizer.ggml.eot_token_id")}
    named |= {plain.fields.get("tokenizer.ggml.fim_pad_token_id")}
    added = [f"{text} ({vocabulary.tokens.index(text)})" for text in found]
    added = [
        each for each, i in zip(added, checkpoint.eos_token_ids, strict=True) if i not in named
    ]
    line = f"target: answers also end at {', '.join(added)}, known by their texts as in llama.cpp"
    lines = written_tokenizer(checkpoint, tmp_path / "bundle")[1]
    assert [each for each in lines if "also end" in each] == ([line] if added else [])


def test_a_closing_tag_of_html_is_text(file, tmp_path):
    runtime, _ = written(
        write_vocabulary(file, with_tokens(byte_level(pre="qwen2"), "</s>")), tmp_path / "bundle"
    )
    assert runtime.decode(runtime.encode("q</s>!")) == "q</s>!"


def test_padding_by_a_plain_token_leaves_it_plain(file, tmp_path):
    vocabulary = byte_level(pre="qwen2", padding_token_id=0, unknown_token_id=1)
    runtime, _ = written(write_vocabulary(file, vocabulary), tmp_path / "bundle")
    assert vocabulary.tokens[:2] == ["!", '"']
    assert runtime.decode(runtime.encode('q!!"')) == 'q!!"'


def test_phi_3_drops_spaces_after_its_tokens(file):
    plain, phi_3 = of_characters(), of_characters()
    phi_3.fields["general.name"] = "Phi 3"
    assert ids_of(file, plain, f"{BEGIN}\n") != ids_of(file, plain, BEGIN)
    assert ids_of(file, phi_3, f"{BEGIN}\n") == ids_of(file, plain, f"{BEGIN}\n")
    phi_3.fields["general.name"] = "Phi-3 mini"
    assert ids_of(file, phi_3, f"{BEGIN}\n") == ids_of(file, plain, BEGIN)


def test_a_file_without_a_name_is_read_with_a_warning(file, tmp_path):
    _, lines = written(write_vocabulary(file, byte_level()), tmp_path / "bundle")
    assert [line for line in lines if "does not name its pre-tokenizer" in line]
    write_vocabulary(file, byte_level(pre="gpt-2"))
    assert not [line for line in written(file, tmp_path / "other")[1] if "pre-tokenizer" in line]


UNKNOWN = ("kimi-k2", "tiny_aya", "jina-v2-de", "of-tomorrow")  # pre-tokenizers
REFUSED: list[tuple[Vocabulary, str]] = [
    *((byte_level(pre=name), f"{name!r}") for name in UNKNOWN),
    *(
        (dataclasses.replace(of_characters(), model=model), f"{model!r}")
        for model in ("t5", "bert", "rwkv", "plamo2", "no_vocab")
    ),
    (byte_level(pre="gpt-2", eos_token_id=2**31), "token 2147483648 as tokenizer.ggml.eos_token"),
    (dataclasses.replace(byte_level(), merges=None), "has no merges"),
    (dataclasses.replace(byte_level(), merges=["a qqq"]), "merges ('a', 'qqq'), which"),
    (dataclasses.replace(byte_level(), kinds=[1]), "kinds for 1"),
    (dataclasses.replace(of_characters(), scores=[0.0] * 3), "has 3 scores"),
    (dataclasses.replace(of_characters(), scores=None), "has 0 scores"),
]


@pytest.mark.parametrize(("vocabulary", "reason"), REFUSED, ids=lambda value: str(value)[:30])
def test_an_unknown_or_contradictory_vocabulary_is_refused(file, vocabulary, reason):
    assert not PRE_TOKENIZERS.keys() & {*UNKNOWN}
    assert reason in refusal(file, vocabulary)


def test_a_begin_token_that_is_not_named_is_left_out_or_refused_if_it_is_wanted(file):
    vocabulary = byte_level(pre="llama-bpe", add_bos_token=True)
    del vocabulary.fields["tokenizer.ggml.bos_token_id"]
    assert "tokenizer.ggml.add_bos_token" in refusal(file, vocabulary)
    vocabulary = byte_level(pre="llama-bpe")
    tokenizer = gguf_tokenizer(write_vocabulary(file, vocabulary))
    assert tokenizer.encode("ab")[0] == vocabulary.fields["tokenizer.ggml.bos_token_id"]
    del vocabulary.fields["tokenizer.ggml.bos_token_id"]
    tokenizer = gguf_tokenizer(write_vocabulary(file, vocabulary))
    assert tokenizer.encode("ab") == tokenizer.encode("ab", add_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "attribute"), [("padding", "pad"), ("mask", "mask"), ("unknown", "unk")]
)
def test_dispensable_tokens_beyond_the_vocabulary_are_none(file, name, attribute):
    wrong = byte_level(pre="gpt-2", **{f"{name}_token_id": 2**32 - 1})
    tokenizer = gguf_tokenizer(write_vocabulary(file, wrong))
    assert getattr(tokenizer, f"{attribute}_token") is None
    assert tokenizer.encode("ab") == ids_of(file, byte_level(pre="gpt-2"), "ab")


def test_all_chat_templates_of_a_file_are_read(file):
    vocabulary = byte_level(pre="gpt-2")
    fields: dict[str, Any] = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool": "b"}
    fields["tokenizer.chat_templates"] = ["tool"]
    whole = dataclasses.replace(vocabulary, fields={**vocabulary.fields, **fields})
    tokenizer = gguf_tokenizer(write_vocabulary(file, whole))
    assert tokenizer.chat_template == {"default": "a", "tool": "b"}
