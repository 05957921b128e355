"""The CPython standard library as training text: documents, tokenizer, token streams, windows."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from dsbd_export.texts import is_held_out

VOCAB_SIZE = 4096
BOS, EOS = "<|begin|>", "<|end|>"
BOS_ID, EOS_ID = 0, 1

# Generated tables and prose. They are predictable or not Python, so they would distort the results.
EXCLUDED_FOLDERS = ("site-packages", "encodings", "pydoc_data", "lib2to3/tests/data", "__pycache__")


def stdlib_sources() -> Iterator[tuple[str, str]]:
    """Yield (relative path, source) of every parseable module of the running Python, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if any(f"{folder}/" in f"{relative}/" for folder in EXCLUDED_FOLDERS):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            ast.parse(source)
        except (SyntaxError, ValueError):  # files that test the parser or other encodings
            continue
        if source.strip():
            yield relative, source


def definitions(source: str) -> Iterator[str]:
    """Yield every top-level function and class of a module as a separate document.

    They teach the models to end after one definition, so that completions of a prompt such as
    ``def read_json(path):`` reach an end-of-sequence token.
    """
    lines = source.splitlines(keepends=True)
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield "".join(lines[first - 1 : node.end_lineno]).rstrip("\n") + "\n"


def documents(held_out: bool) -> list[str]:
    """Return the documents of one split: whole modules and their top-level definitions."""
    texts: list[str] = []
    for relative, source in stdlib_sources():
        if is_held_out(relative) == held_out:
            texts.append(source)
            texts.extend(definitions(source))
    return texts


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train the byte-level BPE of ``VOCAB_SIZE`` tokens; ``encode`` prepends the BOS token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def token_stream(
    tokenizer: Tokenizer, texts: list[str], rng: np.random.Generator
) -> NDArray[np.uint16]:
    """Return all documents, shuffled, each as BOS ... EOS, in one array."""
    order = rng.permutation(len(texts))
    encoded = tokenizer.encode_batch([texts[i] for i in order])
    return np.concatenate([np.array([*e.ids, EOS_ID], dtype=np.uint16) for e in encoded])
