"""A GGUF file is exported as transformers reads it: weights, tokenizer, template, end tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from dsbd_export import progress
from dsbd_export.checkpoints.gguf_file import is_gguf
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ExportConfig
from dsbd_export.demo import demo_pair
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_pair
from dsbd_export.pipeline import export_bundle
from dsbd_export.progress import silent
from dsbd_ort.pipeline import Pipeline
from scripts.family_checkpoints import write_family_checkpoint
from tests.export.adapters import lora, write_adapter
from tests.export.conftest import written_tokenizer
from tests.export.gguf_files import KINDS, write_gguf

TEMPLATE = "{% for message in messages %}<|begin|>{{ message['content'] }}{% endfor %}"
PROMPT = "Once upon a time"
NEW_TOKENS = 12
TARGET, DRAFT = demo_pair()


def config_of(file: Path, output: Path | None = None) -> ExportConfig:
    return ExportConfig(target=str(file), output=output or file.parent / "bundle")


def refusal(file: Path) -> str:
    with pytest.raises(ExportError) as caught:
        open_pair(config_of(file))
    return str(caught.value)


def check_tokens(file: Path) -> None:
    """Export a file; the most probable tokens must be those of transformers on the same file."""
    config = config_of(file)
    export_bundle(config, report=silent)
    checkpoint, _ = open_pair(config)
    model = load_model(checkpoint)
    with Pipeline.from_bundle(config.output) as pipeline:
        ids = pipeline.tokenizer.encode(PROMPT)
        found = pipeline.generate(PROMPT, strategy="greedy", max_new_tokens=NEW_TOKENS)
    wanted = model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=[1]
    )[0, len(ids) :]
    assert list(found.sequences[0].token_ids) == wanted.tolist()
    assert (config.output / "chat_template.jinja").read_text() == TEMPLATE
    assert checkpoint.eos_token_ids == [1]


def test_a_quantized_file_gives_the_tokens_of_transformers(tmp_path):
    check_tokens(write_gguf(DRAFT, tmp_path / "m.gguf", "Q8_0", template=TEMPLATE))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_quantization_of_the_demo_target(tmp_path, kind):
    check_tokens(write_gguf(TARGET, tmp_path / "m.gguf", kind, template=TEMPLATE))


KIND_ERRORS = [("F32", 0.0), ("BF16", 0.004), ("Q4_K", 0.1), ("Q6_K", 0.025)]


@pytest.mark.parametrize(("kind", "error"), KIND_ERRORS)
def test_weights_are_those_of_the_folder_that_the_file_was_made_from(tmp_path, kind, error):
    checkpoint, _ = open_pair(config_of(write_gguf(TARGET, tmp_path / "m.gguf", kind)))
    model = load_model(checkpoint)
    assert isinstance(model, LlamaForCausalLM)
    weights = model.state_dict()
    for name, wanted in load_file(TARGET / "model.safetensors").items():
        difference = (weights[name] - wanted.float()).square().mean().sqrt()
        assert difference <= error * wanted.float().square().mean().sqrt(), name


def test_dequantizing_is_counted_and_no_bar_is_drawn(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN", 0.0)
    file, lines = write_gguf(DRAFT, tmp_path / "m.gguf", "Q8_0"), []
    load_model(open_pair(config_of(file))[0], report=lines.append)
    sizes = np.cumsum([tensor.n_bytes for tensor in GGUFReader(file).tensors]) / 10**6
    phase = "target: dequantizing m.gguf"
    said = [line.split(", about ")[0] for line in lines]
    assert said == [phase, *(f"{phase}: {n:.1f} of {sizes[-1]:.1f} MB" for n in sizes[:-1])]
    assert len(set(said)) > 5
    assert capfd.readouterr().err == ""


def test_a_weight_of_another_shape_is_named(tmp_path):
    file = write_gguf(DRAFT, tmp_path / "m.gguf", "F16", end_of_turn=7)
    data = file.read_bytes()
    at = data.index(b"llama.attention.head_count_kv") + len("llama.attention.head_count_kv") + 4
    file.write_bytes(data[:at] + (1).to_bytes(4, "little") + data[at + 4 :])
    words = r"k_proj\.weight has the shape \(160, 160\), \(32, 160\)"
    with pytest.raises(ExportError, match=words):
        load_model(open_pair(config_of(file))[0])


def test_an_answer_also_ends_at_the_end_of_a_turn(tmp_path):
    file = write_gguf(DRAFT, tmp_path / "m.gguf", "F16", end_of_turn=7)
    assert open_pair(config_of(file))[0].eos_token_ids == [1, 7]
    write_gguf(DRAFT, file, "F16", end_of_turn=99999)
    assert "names token 99999 as tokenizer.ggml.eot_token_id" in refusal(file)


def test_an_adapter_is_merged_into_the_weights_of_a_file(tmp_path):
    file = write_gguf(DRAFT, tmp_path / "m.gguf", "F32")
    adapter = write_adapter(DRAFT, tmp_path / "adapter", lora())
    both = [
        ExportConfig(target=str(base), adapter=str(adapter), output=tmp_path)
        for base in (file, DRAFT)
    ]
    found, wanted = (load_model(open_pair(config)[0]).state_dict() for config in both)
    for name, weight in wanted.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


def test_other_files_of_the_folder_are_not_read(tmp_path):
    file = write_gguf(DRAFT, tmp_path / "m.gguf", "F16")
    for name in ("tokenizer.json", "generation_config.json", "config.json"):
        (tmp_path / name).write_text("of another model")
    checkpoint, _ = open_pair(config_of(file))
    written_tokenizer(checkpoint, tmp_path / "files")
    assert not (tmp_path / "files" / "generation_config.json").exists()


def test_an_unknown_architecture_and_changed_frequencies_are_refused(tmp_path):
    file = write_gguf(DRAFT, tmp_path / "m.gguf", "F16", architecture="rwkv99")
    assert "rwkv99" in refusal(file) and "checkpoint folder" in refusal(file)
    file = write_gguf(DRAFT, tmp_path / "m.gguf", "F16", scaling="yarn")
    assert "llama.rope.scaling.type = 'yarn'" in refusal(file)


def llama3_factors(rope: dict[str, float], head_dim: int) -> NDArray[np.float32]:
    """Return what converters store for Llama 3.1: by how much they divide each frequency."""
    frequencies = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def test_rotary_frequencies_of_llama_3_1_are_divided_as_in_its_folder(tmp_path):
    folder = write_family_checkpoint("llama-llama3", tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    factors = llama3_factors(config["rope_parameters"], head_dim)
    assert factors.min() == 1 < factors.max()
    file = write_gguf(folder, tmp_path / "m.gguf", "F32", rope_factors=factors)
    ids = torch.randint(300, (1, 250), generator=torch.Generator().manual_seed(0))
    models = [load_model(open_pair(config_of(each, tmp_path))[0]) for each in (file, folder)]
    with torch.inference_mode():
        found, wanted = (model(input_ids=ids).logits.numpy() for model in models)
    np.testing.assert_allclose(found, wanted, atol=2e-4)
    plain = write_gguf(folder, tmp_path / "plain.gguf", "F32")
    with torch.inference_mode():
        without = load_model(open_pair(config_of(plain))[0])(input_ids=ids).logits.numpy()
    assert np.abs(without - wanted).max() > 1e-2


def test_a_file_of_another_kind_and_a_folder_are_refused(tmp_path):
    file = tmp_path / "model.gguf"
    assert "does not exist" in refusal(file)
    file.write_bytes(b"version https://git-lfs")
    assert not is_gguf(file) and "is not a GGUF file" in refusal(file)
    file.rename(tmp_path / "model-Q8_0.gguf")
    assert "model-Q8_0.gguf" in refusal(tmp_path)  # the one to name
