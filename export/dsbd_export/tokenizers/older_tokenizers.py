"""Tokenizers without tokenizer.json: their files, how each is built and checked.

file                         built                                          checked by
vocab.json and merges.txt    by the class that tokenizer_config.json names  decoding its own ids
tekken.json (Mistral)        by transformers, special tokens from the file  decoding its own ids
tokenizer.model              by the settings of the file, not its class     sentencepiece itself
tiktoken, any name           not: it has neither a splitting into words nor special tokens
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import sentencepiece
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TokenizersBackend

from dsbd_export.checkpoints.json_files import json_object
from dsbd_runtime.bundle_files.bundle import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

OLDER_FILES = ("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
"""Patterns of tokenizer files other than tokenizer.json."""

SENTENCEPIECE_FILE, _TEKKEN_FILE = "tokenizer.model", "tekken.json"
_VOCABULARIES = ("vocab.json", "vocab.txt")
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")  # a token in base64, its rank
_STACKS = ("a\u0308\u0323", "\u00a0\u200d\ufeff")
_TEKKEN_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}


def is_built(folder: Path) -> bool:
    """Return whether a folder has no tokenizer.json, so that transformers builds one."""
    return not (folder / TOKENIZER_FILE).is_file()


def has_older_files(folder: Path) -> bool:
    """Return whether there are files to build a tokenizer from."""
    return any(found for pattern in OLDER_FILES for found in folder.glob(pattern))


def load_folder(folder: Path, **options: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder as transformers loads it."""
    tokenizer: PreTrainedTokenizerBase
    if sentencepiece_file(folder) is not None:
        # Classes such as LlamaTokenizer set spaces and merges differently from the file.
        tokenizer = TokenizersBackend.from_pretrained(str(folder), **options)
    else:
        options |= _tekken_options(folder)
        tokenizer = AutoTokenizer.from_pretrained(str(folder), mistral_format=False, **options)
    return tokenizer


def tiktoken_file(folder: Path) -> Path | None:
    """Return the tiktoken file if it is the only tokenizer file, else None."""
    if _has_other_files(folder):
        return None
    files = sorted([*folder.glob("*.tiktoken"), *folder.glob("*.model")])
    return next((file for file in files if _is_tiktoken(file)), None)


def sentencepiece_file(folder: Path) -> Path | None:
    """Return the sentencepiece file if it is the only tokenizer file, else None."""
    file = folder / SENTENCEPIECE_FILE
    if not file.is_file() or _has_other_files(folder) or _is_tiktoken(file):
        return None
    return file


def sentencepiece_ids(file: Path, texts: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield texts with their ids by sentencepiece, without leading spaces and ``_STACKS``."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    for text in texts:
        plain = without_stacks(text.lstrip(" "))
        yield plain, processor.encode(plain)


def without_stacks(text: str) -> str:
    """Return a text without ``_STACKS``, see ``sentencepiece_ids``."""
    for stack in _STACKS:
        text = text.replace(stack, "")
    return text


def lacks_chat_template(folder: Path, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether this is a tekken.json without a separate chat template."""
    return _is_tekken(folder) and tokenizer.chat_template is None


def _is_tekken(folder: Path) -> bool:
    return (folder / _TEKKEN_FILE).is_file() and is_built(folder)


def _tekken_options(folder: Path) -> dict[str, Any]:
    """Return settings of tekken.json that transformers ignores and tokenizer_config.json lacks."""
    if not _is_tekken(folder):
        return {}
    named = json_object(folder / _TEKKEN_FILE).get("special_tokens")
    known = {entry["token_str"] for entry in named or ()}
    options: dict[str, Any] = {
        name: token for name, token in _TEKKEN_TOKENS.items() if token in known
    }
    options["add_bos_token"] = "bos_token" in options
    config = folder / TOKENIZER_CONFIG_FILE
    said = json_object(config) if config.is_file() else {}
    return {name: value for name, value in options.items() if name not in said}


def _has_other_files(folder: Path) -> bool:
    names = (TOKENIZER_FILE, _TEKKEN_FILE, *_VOCABULARIES)
    return any((folder / name).is_file() for name in names)


def _is_tiktoken(file: Path) -> bool:
    with file.open("rb") as content:
        return _TIKTOKEN_LINE.match(content.readline()) is not None
