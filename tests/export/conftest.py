"""Tiny random checkpoints in the Hugging Face layout, and bundles made of them once a session."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from dsbd_export.config import ExportConfig
from dsbd_export.model_source import SourceOf
from dsbd_export.opening import source_of
from dsbd_export.pipeline import ExportResult, export_bundle
from scripts.family_checkpoints import VOCAB_SIZE, write_checkpoint
from scripts.shared_captures import SharedCaptures
from tests.made_once import made_once

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Exported:
    """A bundle and what was said while it was made."""

    config: ExportConfig
    result: ExportResult
    report: list[str]

    def graph(self, role: str, file: str = "model.onnx") -> onnx.GraphProto:
        return self.model(role, file).graph

    def model(self, role: str, file: str = "model.onnx") -> onnx.ModelProto:
        return onnx.load(self.config.output / role / file, load_external_data=False)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**SIZES, num_hidden_layers=2, tie_word_embeddings=True)
    return write_checkpoint(tmp_path_factory.mktemp("llama"), config)


@pytest.fixture(scope="session")
def small_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**SIZES, num_hidden_layers=1, tie_word_embeddings=False)
    return write_checkpoint(tmp_path_factory.mktemp("small-llama"), config)


@pytest.fixture(scope="session")
def exported(
    tmp_path_factory: pytest.TempPathFactory, llama_folder: Path, small_llama_folder: Path
) -> Exported:
    """Llama with tied weights, two layers; its draft without ties, one layer."""
    return exported_once(tmp_path_factory, "llamas", llama_folder, small_llama_folder)


@pytest.fixture(scope="session")
def exported_others(tmp_path_factory: pytest.TempPathFactory, captures: SharedCaptures) -> Exported:
    """Target: Qwen2 with a full and a sliding layer. Draft: Mistral, every layer sliding."""
    mixed = Qwen2Config(
        **SIZES,
        num_hidden_layers=2,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
    )
    sliding = MistralConfig(**SIZES, num_hidden_layers=1, sliding_window=8)
    folder = tmp_path_factory.mktemp("others")
    target = write_checkpoint(folder / "qwen2", mixed)
    draft = write_checkpoint(folder / "mistral", sliding)
    return exported_once(tmp_path_factory, "others", target, draft, captures)


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Targets of feature drafts, seven layers each."""
    folder = tmp_path_factory.mktemp("targets")
    sizes = {**SIZES, "num_hidden_layers": 7, "tie_word_embeddings": False}
    configs = {"llama": LlamaConfig(**sizes), "qwen3": Qwen3Config(**sizes, head_dim=16)}
    return {name: write_checkpoint(folder / name, config) for name, config in configs.items()}


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, llama_folder: Path) -> Path:
    """The target of ``exported``, without its draft, captured anew."""

    def make(output: Path) -> Path:
        export_bundle(ExportConfig(target=str(llama_folder), output=output), report=lambda _: None)
        return output

    return made_once(tmp_path_factory, "alone", make)


def export(config: ExportConfig, source_of: SourceOf) -> Exported:
    report: list[str] = []
    return Exported(
        config, export_bundle(config, report=report.append, source_of=source_of), report
    )


def exported_once(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    target: Path,
    draft: Path,
    source_of: SourceOf = source_of,
) -> Exported:
    """Export, or return what another process of the run has exported of the same checkpoints."""

    def make(folder: Path) -> Exported:
        return export(ExportConfig(target=str(target), draft=str(draft), output=folder), source_of)

    return made_once(tmp_path_factory, name, make)


def swap_tokens(folder: Path, first: str, second: str) -> None:
    """Exchange the ids of two tokens of a checkpoint, whose tokenizer is then another."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(content), encoding="utf-8")
