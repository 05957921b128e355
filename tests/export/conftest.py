"""Tiny random checkpoints in the Hugging Face layout, and bundles made of them once a session."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from dsbd_export.config import ExportConfig
from dsbd_export.pipeline import ExportResult, export_bundle
from dsbd_export.quiet import quiet_libraries

VOCAB_SIZE = 300
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


def tiny_tokenizer(texts: tuple[str, ...] = ("def read(path): return path",)) -> Tokenizer:
    """A byte-level BPE of at most VOCAB_SIZE tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts * 3, trainer)
    return tokenizer


def write_checkpoint(folder: Path, config: PreTrainedConfig) -> Path:
    """A checkpoint with random weights, large enough that every part of the model matters."""
    torch.manual_seed(0)
    with quiet_libraries():
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.2)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        model.half().save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


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
    return export(llama_folder, small_llama_folder, tmp_path_factory.mktemp("llamas") / "bundle")


@pytest.fixture(scope="session")
def exported_others(tmp_path_factory: pytest.TempPathFactory) -> Exported:
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
    return export(target, draft, folder / "bundle")


def export(target: Path, draft: Path, output: Path) -> Exported:
    config = ExportConfig(target=str(target), draft=str(draft), output=output)
    report: list[str] = []
    return Exported(config, export_bundle(config, report=report.append), report)
