"""Bundles of every kind of model, for whole requests drawn at random.

``MODEL_KINDS`` has a row for each. Those of CI come from exports that other tests read as well, or
are made in seconds.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from transformers import LlamaConfig

from scripts.family_checkpoints import VOCAB_SIZE, WINDOW, write_checkpoint
from scripts.shared_captures import SharedCaptures
from tests.encoder_decoder_pair import LANGUAGES, exported, exported_translator
from tests.export.conftest import SIZES
from tests.export.feature_checkpoints import write_library, written
from tests.export.mtp_checkpoints import with_head
from tests.exports import export_quietly, family_pair
from tests.made_once import made_once
from tests.robustness.demo_requests import Texts
from tests.runtime.bundle_edits import without_draft
from tests.runtime.feature_pair import DRAFT, TARGET
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle
from tests.runtime.tiny_tokenizer import BOS
from tests.runtime.tiny_tokenizer import VOCAB_SIZE as NUM_BYTES

STOPS = ("re", "(", "self", "\n")
SOURCE_TEXTS = Texts(
    prompts=("def read", "return x", "import os, re", "é", [290, 7, 50, 1], [5], [70] * 40),
    stops=STOPS,
    vocab_size=VOCAB_SIZE,
)
# one token; as many as a window, and one more; beyond several folds of a recurrence
LENGTHS = (1, WINDOW, WINDOW + 1, 40, 150)
FAMILY_TEXTS = Texts(
    prompts=(
        "def read(path): return",
        "é",
        *([3 + (7 * i * i + i) % (VOCAB_SIZE - 3) for i in range(length)] for length in LENGTHS),
        [60, 61, 62] * 30,
    ),
    stops=STOPS,
    vocab_size=VOCAB_SIZE,
    most_new_tokens=24,
)
BYTE_TEXTS = Texts(
    prompts=("def read(path)", "é", "ab ab ab ab", "x" * 100, [7]),
    stops=("e", "ab", "\n"),
    vocab_size=NUM_BYTES,
    special=(BOS, NUM_BYTES - 2),
)
Make = Callable[[SharedCaptures, Path], Path]


@dataclass(frozen=True)
class ModelKind:
    """A bundle and what its requests are drawn from.

    Attributes:
        name: of its folder; bundles of the same name are made once for all tests.
        make: fills a folder, which does not exist, and returns it; it has "bundle" then.
        is_long: whether it is left to the long form.
    """

    name: str
    make: Make
    texts: Texts = field(default=FAMILY_TEXTS, repr=False)
    is_long: bool = True

    def bundle(self, factory: pytest.TempPathFactory, captures: SharedCaptures) -> Path:
        return made_once(factory, self.name, functools.partial(self.make, captures)) / "bundle"


def families(target: str, draft: str, *, is_long: bool = True, **options: str) -> ModelKind:
    name, make = family_pair(target, draft, **options)
    return ModelKind(name, make, is_long=is_long)


def tiny_features(captures: SharedCaptures, folder: Path) -> Path:
    write_tiny_bundle(folder / "bundle", target=TARGET, draft=DRAFT)
    return folder


def tiny_draftless(captures: SharedCaptures, folder: Path) -> Path:
    write_tiny_bundle(folder / "bundle", target=TinyModel())
    without_draft(folder / "bundle", TinyModel())
    return folder


def eagle3(captures: SharedCaptures, folder: Path, **options: str) -> Path:
    target = write_checkpoint(folder / "target", LlamaConfig(**SIZES, num_hidden_layers=7))
    draft = written(folder, write_library, {})
    export_quietly(captures, folder / "bundle", target, draft, **options)
    return folder


def with_mtp(family: str, captures: SharedCaptures, folder: Path, **options: str) -> Path:
    target = with_head(family, folder / "target")
    export_quietly(captures, folder / "bundle", target, "mtp", **options)
    return folder


def sources(target: str, draft: str) -> Make:
    return lambda captures, to: exported(target, draft, captures, to)


MODEL_KINDS = {
    "a source with languages": ModelKind(  # M2M100, drafted by BART, which has the same tokens
        "translator-pair",
        lambda captures, to: exported_translator("bart", captures, to),
        Texts(**vars(SOURCE_TEXTS) | {"languages": tuple(LANGUAGES)}),
        is_long=False,
    ),
    "Marian drafted by T5": ModelKind(
        "encoder-decoders", sources("marian", "t5"), SOURCE_TEXTS, is_long=False
    ),
    "T5 drafted by Marian": ModelKind("t5-marian", sources("t5", "marian"), SOURCE_TEXTS),
    "Granite hybrid": families("granite_hybrid", "qwen3_5", is_long=False),
    "LFM2": families("lfm2", "llama", is_long=False),
    "Qwen3.5": families("qwen3_5", "lfm2", is_long=False),
    "Mamba2": families("mamba2", "llama"),
    "Mamba2 as a draft": families("llama", "mamba2"),
    "features": ModelKind("tiny-features", tiny_features, BYTE_TEXTS, is_long=False),
    "no draft": ModelKind("tiny-draftless", tiny_draftless, BYTE_TEXTS, is_long=False),
    "EAGLE-3": ModelKind("eagle3", eagle3),
    "EAGLE-3 in int8": ModelKind("eagle3-int8", functools.partial(eagle3, quantize="int8-dynamic")),
    "MTP of a hybrid": ModelKind(
        "mtp-qwen3_5", functools.partial(with_mtp, "qwen3_5"), is_long=False
    ),
    "MTP of latent attention": ModelKind(
        "mtp-deepseek_v3", functools.partial(with_mtp, "deepseek_v3", logits="topk:64")
    ),
    "MTP with a window in int8": ModelKind(
        "mtp-mimo", functools.partial(with_mtp, "mimo_v2_flash", quantize="int8-dynamic")
    ),
    "windows and sinks in int8": families(
        "granite_swa", "mistral", quantize="int8-dynamic", is_long=False
    ),
    "windows in int8": families("gemma3", "granite_swa", quantize="int8-dynamic"),
    "experts and sinks in int8": families("gpt_oss", "phi3", quantize="int8-dynamic"),
}
