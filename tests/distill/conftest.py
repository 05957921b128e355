"""A tiny target, texts, and a draft distilled from them once a session."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import LlamaConfig

from dsbd_distill.config import DistillConfig
from dsbd_distill.draft_kind import DraftKind
from dsbd_distill.draft_run import distill
from dsbd_distill.teacher import TEXT_SAMPLING, Sampling, TorchDevice
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.config import ModelOptions
from dsbd_export.opening import open_target
from dsbd_ort.pipeline import Pipeline
from dsbd_runtime.bundle_files.draft_record import RECORD_FILE, DraftRecord
from scripts.family_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.made_once import made_once

CONTEXT = 64
FILES = {  # of a draft; the configs of tokenizer and generation are the target's
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
    *("tokenizer_config.json", RECORD_FILE),
}
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
        return Distilled(config, *run(config))

    return made_once(tmp_path_factory, name, make)


def run(config: DistillConfig, **options: Any) -> tuple[DraftRecord, list[str]]:
    """Distil, without speeds by default; return the record and what was reported."""
    report: list[str] = []
    options = {"measure_speed": None, "report": report.append, **options}
    return distill(config, **options), report


def drafts_of(
    kind: type[DraftKind],
    checkpoint: Any,
    target: Any = None,
    *,
    sampling: Sampling = TEXT_SAMPLING,
    **options: Any,
) -> DraftKind:
    """Return drafts of a kind for a target, without data to learn from."""
    config = DistillConfig(target="", data=("",), output=Path("draft"), **options)
    teaching: Any = SimpleNamespace(
        checkpoint=checkpoint,
        target=target,
        device=TorchDevice("cpu", uses_bf16=False),
        held_out=SimpleNamespace(sampling=sampling),
    )
    return kind(config, teaching, None)


def interrupted(config: DistillConfig, words: str, **options: Any) -> None:
    """Interrupt a distillation at a reported line that begins with some words."""

    def report(line: str) -> None:
        if line.startswith(words):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, report=report, **options)


def opened(target: Path) -> Checkpoint:
    return open_target(str(target), ModelOptions())


def assert_same_ids(pipe: Pipeline, drafted: str, plain: str, *given: str, **options: Any) -> None:
    """Compare the sequences of two strategies, one of which drafts three tokens at a time."""
    forced = {"draft_policy": "fixed", "draft_length": 3}
    found, wanted = (
        pipe.generate(*given, strategy=name, **options, **more)
        for name, more in ((drafted, forced), (plain, {}))
    )
    assert found.stats.num_draft_tokens > 0
    assert found.stats.num_iterations <= wanted.stats.num_iterations
    assert [s.token_ids for s in found.sequences] == [s.token_ids for s in wanted.sequences]


def assert_same_weights(folder: Path, other: Path) -> None:
    found, wanted = (load_file(each / "model.safetensors") for each in (folder, other))
    assert found.keys() == wanted.keys()
    assert all((found[name] == value).all() for name, value in wanted.items())


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
