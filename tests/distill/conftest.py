"""A tiny target, texts, and a draft distilled from them once a session."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import LlamaConfig

from dsbd_distill.config import DistillConfig
from dsbd_distill.draft_run import distill
from dsbd_runtime.bundle_files.draft_record import DraftRecord
from scripts.family_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.made_once import made_once

CONTEXT = 64
STEPS = 60
TARGET = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=CONTEXT,
    bos_token_id=0,
    eos_token_id=1,
)


@dataclass(frozen=True)
class Distilled:
    """A draft and what was said while it was made."""

    config: DistillConfig
    record: DraftRecord
    report: list[str]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target") / "TARGET", TARGET)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="session")
def distilled(target: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Distilled:
    return distilled_once(tmp_path_factory, "distilled", target, texts)


@pytest.fixture(scope="session")
def distilled_feature(
    target: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Distilled:
    options = {"kind": "feature", "params": "60K"}
    return distilled_once(tmp_path_factory, "distilled_feature", target, texts, **options)


def distilled_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, target: Path, texts: Path, **options: str
) -> Distilled:
    """Distil, or return what another process of the run has distilled of the same target."""

    def make(folder: Path) -> Distilled:
        folder.mkdir()
        config = config_of(target, texts, folder / "draft", **options)
        report: list[str] = []
        return Distilled(config, distill(config, report=report.append, measure_speed=None), report)

    return made_once(tmp_path_factory, name, make)


def config_of(target: Path, texts: Path, output: Path, **options: object) -> DistillConfig:
    settings = {"steps": STEPS, "params": "32K", **options}
    return DistillConfig(target=str(target), data=(str(texts),), output=output, **settings)


def write_texts(folder: Path, num_files: int = 40) -> Path:
    """Programs of 20 lines each, by the number of the file."""
    folder.mkdir(exist_ok=True)
    for number in range(num_files):
        lines = [f"def f{i}(x):\n    return x * {number} + {i}\n" for i in range(10)]
        (folder / f"{number}.py").write_text("".join(lines))
    return folder
