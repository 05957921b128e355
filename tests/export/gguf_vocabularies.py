"""GGUF files of a tiny Llama that are there for their tokenizer, whose words show in its ids.

A vocabulary learns its texts without splitting them into words, until each text is one token. So
whatever splits a text later is seen in its ids: a word that ends elsewhere is another token.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from dsbd_runtime.text.tokenizer import BYTE_BY_SYMBOL
from tests.export.gguf_files import close, llama_writer

BEGIN, END, DEEPSEEK, ACCENTED, THINK, SPACES = (
    "<|begin|>",
    "<|stop|>",
    "<\uff5cUser\u2581\uff5c>",
    "<|\u00e9|>",
    "<think>",
    "  ",
)
ADDED = (BEGIN, END, DEEPSEEK, ACCENTED, THINK)
"""The first three are control tokens, the others are user-defined."""

TEXTS = (
    "1. Read\n\n2. Write",
    "I'M he's we'LL; 12345 67",
    "def f(x):\r\n    return x/y  # ok!!\n\n",
    "na\u00efve caf\u00e9... a\u00a0b\t\tc ",
    "\u65e5\u672c\u8a9e\u3001\u30c6\u30b9\u30c8\u3002\ud55c\uad6d \u4f60\u597d",
    "TextWrapper.isOk(v1234567) $3+4",
    "  a \n b\n",
    "e\u0301a\u0323",
    "it'sa `q`       z  12",
)
SIZES = {
    **{"num_hidden_layers": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5},
    **{"hidden_size": 32, "intermediate_size": 32},
    **{"num_attention_heads": 1, "num_key_value_heads": 1},
}
_SYMBOL_BY_BYTE = {byte: symbol for symbol, byte in BYTE_BY_SYMBOL.items()}
_SPACE = "\u2581"
_Kind = gguf.TokenType


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokenizer fields of a file; ``fields`` are further ones by their names in the format."""

    model: str
    tokens: Sequence[str]
    kinds: Sequence[int] | None
    merges: Sequence[str] | None = None
    scores: Sequence[float] | None = None
    fields: dict[str, Any] = field(default_factory=dict)


def byte_level(texts: Sequence[str] = TEXTS, **fields: Any) -> Vocabulary:
    """Return a BPE of bytes with the tokens ``ADDED``."""
    symbols, merges = _learnt(tuple(_spelled(text) for text in texts))
    tokens = [*dict.fromkeys([*_SYMBOL_BY_BYTE.values(), *symbols])]
    named = {"bos_token_id": len(tokens), "eos_token_id": len(tokens) + 1}
    return Vocabulary(
        model="gpt2",
        tokens=[*tokens, *ADDED],
        kinds=[_Kind.NORMAL] * len(tokens) + [_Kind.CONTROL] * 3 + [_Kind.USER_DEFINED] * 2,
        merges=[" ".join(pair) for pair in merges],
        fields={f"tokenizer.ggml.{name}": value for name, value in (named | fields).items()},
    )


def of_characters(**fields: Any) -> Vocabulary:
    """Return a sentencepiece vocabulary, whose merges follow from its scores."""
    words, _ = _learnt(tuple(_SPACE + text.replace(" ", _SPACE) for text in TEXTS))
    own = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return Vocabulary(
        model="llama",
        tokens=[*own, *words, *ADDED, SPACES],
        kinds=[_Kind.UNKNOWN, _Kind.CONTROL, _Kind.CONTROL]
        + [_Kind.BYTE] * 256
        + [_Kind.NORMAL] * len(words)
        + [_Kind.CONTROL] * 3
        + [_Kind.USER_DEFINED] * 3,
        scores=[0.0] * len(own) + [-float(i) for i in range(len(words))] + [0.0] * 6,
        fields={f"tokenizer.ggml.{name}": value for name, value in fields.items()},
    )


def with_characters(**fields: Any) -> Vocabulary:
    """Return a BPE of characters with merges of its own, as Gemma 4 has it."""
    found = of_characters(**fields)
    _, merges = _learnt(tuple(_SPACE + text.replace(" ", _SPACE) for text in TEXTS))
    known = set(found.tokens)
    pairs = [pair for pair in merges if {*pair, "".join(pair)} <= known]
    return Vocabulary(
        model="gemma4",
        tokens=found.tokens,
        kinds=found.kinds,
        merges=[" ".join(pair) for pair in pairs],
        fields={"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, **found.fields},
    )


def write_vocabulary(file: Path, vocabulary: Vocabulary) -> Path:
    """Write a Llama of one layer, of zeros, with a vocabulary; return ``file``."""
    writer = llama_writer(file, "llama", {**SIZES, "vocab_size": len(vocabulary.tokens)})
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_token_list(vocabulary.tokens)
    if vocabulary.kinds is not None:
        writer.add_token_types(vocabulary.kinds)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    for name, value in vocabulary.fields.items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
        kinds.get(type(value), writer.add_array)(name, value)
    shapes = {"token_embd": (len(vocabulary.tokens), 32), "output_norm": (32,)}
    shapes |= {f"blk.0.{name}_norm": (32,) for name in ("attn", "ffn")}
    products = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{name}": (32, 32) for name in products}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    close(writer)
    return file


def _spelled(text: str) -> str:
    return "".join(_SYMBOL_BY_BYTE[byte] for byte in text.encode())


@functools.cache
def _learnt(texts: tuple[str, ...]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the tokens and the merges of texts, the most frequent neighbours first."""
    rows = [list(text) for text in texts]
    tokens, merges = dict.fromkeys(symbol for row in rows for symbol in row), []
    while counts := Counter(pair for row in rows for pair in itertools.pairwise(row)):
        most = max(counts.values())
        pair = min(each for each, count in counts.items() if count == most)
        merges.append(pair)
        tokens["".join(pair)] = None
        rows = [_merged(row, pair) for row in rows]
    return list(tokens), merges


def _merged(row: Sequence[str], pair: tuple[str, str]) -> list[str]:
    found: list[str] = []
    for symbol in row:
        if found and (found[-1], symbol) == pair:
            found[-1] += symbol
        else:
            found.append(symbol)
    return found
