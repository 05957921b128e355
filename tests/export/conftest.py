"""Tiny random checkpoints in the Hugging Face layout, and bundles made of them once a session."""

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
from numpy.typing import NDArray
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ExportConfig
from dsbd_export.model_source import SourceOf
from dsbd_export.opening import open_checkpoint, source_of
from dsbd_export.parity_cases import Reference
from dsbd_export.pipeline import ExportResult, export_bundle
from dsbd_export.progress import silent
from dsbd_export.tokenizers.tokenizer_files import write_tokenizer_files
from dsbd_runtime.text.tokenizer import Tokenizer
from scripts.family_checkpoints import VOCAB_SIZE, write_checkpoint
from scripts.shared_captures import SharedCaptures
from tests.export.gate import exported_target, references
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
        export_bundle(ExportConfig(target=str(llama_folder), output=output), report=silent)
        return output

    return made_once(tmp_path_factory, "alone", make)


@pytest.fixture(scope="session")
def checkpoint(exported: Exported) -> Checkpoint:
    """The target of ``exported``, with its caches."""
    return exported_target(exported.config, exported.config.output)


@pytest.fixture(scope="session")
def wanted(checkpoint: Checkpoint) -> list[Reference]:
    """All forests of the gate, with the logits of that checkpoint."""
    return references(load_model(checkpoint), checkpoint)


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


def opened(folder: Path, role: str = "target", **options: Any) -> Checkpoint:
    return open_checkpoint(role, folder, ExportConfig(target="", output=Path("out"), **options))


def written_tokenizer(checkpoint: Checkpoint, folder: Path) -> tuple[Tokenizer, list[str]]:
    """Write the tokenizer's files to a new folder; return it as the runtime reads it, and lines."""
    folder.mkdir()
    lines: list[str] = []
    write_tokenizer_files(checkpoint, folder, lines.append)
    return Tokenizer(folder, bos_token_id=checkpoint.bos_token_id), lines


def edit_json(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def swap_tokens(folder: Path, first: str, second: str) -> None:
    """Exchange the ids of two tokens of a checkpoint, whose tokenizer is then another."""
    file = folder / "tokenizer.json"
    model = json.loads(file.read_text())["model"]
    vocab = model["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    edit_json(file, model=model)


def write_merges(folder: Path, merges: Iterable[Sequence[str]]) -> None:
    """Write merges.txt, as GPT-2 came."""
    lines = ["#version: 0.2", *map(" ".join, merges), ""]
    (folder / "merges.txt").write_text("\n".join(lines))


def parsed_graph(text: str, **weights: NDArray[Any]) -> onnx.ModelProto:
    """Return a graph from its inputs on in ONNX's text form, with weights by their names."""
    head = '<ir_version: 10, opset_import: ["": 24]> graph'
    model = onnx.parser.parse_model(f"{head} {text}")
    used = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(array, name) for name, array in weights.items() if name in used
    )
    return model


def export_process(
    *arguments: object, first: str = "", ended_at: str = "no line", number: int = 0
) -> tuple[int, list[str]]:
    """Run dsbd-export in a process after some code; return its exit code and the lines on stderr.

    ended_at: beginning of a line at which it is sent the signal ``number``.
    """
    code = f"{first}\nimport sys; from dsbd_ort.cli import export; export(sys.argv[1:])"
    command, lines = [sys.executable, "-c", code, *map(str, arguments)], []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr or ():
            lines.append(line.rstrip("\n"))
            if line.startswith(ended_at):
                process.send_signal(number)
    return process.returncode, lines
