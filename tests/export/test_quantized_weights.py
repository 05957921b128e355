"""Quantized weights of a checkpoint are read as the numbers that they stand for, or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GptOssConfig, LlamaConfig

from dsbd_distill.draft_model import truncated_target
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.model_loading import load_model, reference_dtype
from dsbd_export.checkpoints.quantized_weights import refusal_of_quantization
from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_pair
from dsbd_export.pipeline import export_bundle
from scripts.family_checkpoints import FAMILY_CHECKPOINTS, write_checkpoint, write_family_checkpoint
from tests.export.adapters import assert_answers_as
from tests.export.conftest import SIZES, edit_json
from tests.export.quantized_checkpoints import (
    AWQ,
    COMPRESSED,
    FP8,
    GPTQ,
    GPTQ_4,
    KINDS,
    MXFP4,
    Kind,
    write_quantized,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint of widths that hold whole words and groups."""
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, tie_word_embeddings=False)
    return write_checkpoint(tmp_path_factory.mktemp("base"), config)


def opened(folder: Path) -> Checkpoint:
    return open_pair(ExportConfig(target=str(folder), output=Path("out")))[0]


def assert_same_weights(quantized: Path, plain: Path) -> None:
    found = load_model(opened(quantized)).state_dict()
    wanted = load_model(opened(plain)).state_dict()
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        np.testing.assert_allclose(found[name], weight, rtol=1e-6, err_msg=name)


def refusal(folder: Path) -> str:
    with pytest.raises(ExportError) as caught:
        load_model(opened(folder))
    message = str(caught.value)
    assert f"the target at {folder}" in message and "export the model that" in message
    return message


@pytest.mark.parametrize("kind", [*KINDS.values(), *COMPRESSED.values()], ids=[*KINDS, *COMPRESSED])
def test_weights_are_the_numbers_that_are_meant(base, tmp_path, kind):
    assert_same_weights(*write_quantized(base, tmp_path, kind))


def test_mxfp4_experts_are_the_numbers_that_are_meant(tmp_path):
    arguments = FAMILY_CHECKPOINTS["gpt_oss"].arguments | {"intermediate_size": 96}  # 3 blocks
    base = write_checkpoint(tmp_path / "base", GptOssConfig(**arguments))
    assert_same_weights(*write_quantized(base, tmp_path, MXFP4))


OTHER_BASES = [  # experts of a mixture, and the text part of a composite
    ("qwen3_moe", "fp8-blocks-that-end-early"),
    ("qwen3_moe", "gptq"),
    ("mistral3", "fp8-tensor"),
]


@pytest.mark.parametrize(("family", "kind"), OTHER_BASES)
def test_weights_of_other_models_are_read_too(tmp_path, family, kind):
    base = write_family_checkpoint(family, tmp_path / "base")
    assert_same_weights(*write_quantized(base, tmp_path, KINDS[kind]))


def test_a_bundle_answers_as_the_plain_checkpoint(base, tmp_path):
    quantized, plain = write_quantized(base, tmp_path, KINDS["gptq"])
    config = ExportConfig(target=str(quantized), output=tmp_path / "bundle")
    export_bundle(config, report=lambda _: None)
    assert_answers_as(config.output, load_model(opened(plain)))


def test_the_reference_is_that_of_the_numbers_in_fp32(base, tmp_path):
    quantized, _ = write_quantized(base, tmp_path, KINDS["awq"])
    assert reference_dtype(opened(quantized), "fp16") == "fp32"


def test_a_draft_of_the_layers_of_a_quantized_target_is_plain(base, tmp_path):
    checkpoint = opened(write_quantized(base, tmp_path, KINDS["awq"])[0])
    draft = truncated_target(load_model(checkpoint), checkpoint, 1)
    assert not hasattr(draft.config, "quantization_config")


INT8 = COMPRESSED["int8"].config
TWO_GROUPS = {f"group_{i}": INT8["config_groups"]["group_0"] for i in range(2)}
UNREAD: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "(bitsandbytes, which is not read)"),
    ({"load_in_8bit": True}, "(bitsandbytes, which is not read)"),
    ({"quant_method": "bitnet"}, "(bitnet, which is not read)"),
    ({"quant_method": "hqq"}, "(hqq, which is not read)"),
    ({"quant_method": "new"}, "(new, which is not read)"),
    ({}, "(a method that is not named, which is not read)"),
    (GPTQ | {"bits": 3}, "(gptq in the format gptq with 3 bits, which is not read)"),
    (GPTQ | {"checkpoint_format": "marlin"}, "(gptq in the format marlin with 4 bits,"),
    (AWQ | {"version": "gemv"}, "(awq in the version gemv with 4 bits, which is not read)"),
    (FP8 | {"scale_fmt": "ue8m0"}, "(fp8 with scales or experts of another type,"),
    (INT8 | {"config_groups": TWO_GROUPS}, "2 groups of the formats int-quantized"),
    (INT8 | {"format": "marlin-24"}, "1 groups of the formats marlin-24"),
    (INT8 | {"transform_config": {"a": 1}}, "with a transform_config"),
]


@pytest.mark.parametrize(("config", "words"), UNREAD)
def test_what_is_not_read_is_refused_by_name(base, tmp_path, config, words):
    folder, _ = write_quantized(base, tmp_path, Kind(config, GPTQ_4))
    with pytest.raises(ExportError) as caught:
        opened(folder)  # before any weight is read
    said = str(caught.value)
    assert "its weights are already quantized (" in said and words in said
    assert "export the model that they were made from, with --quantize" in said


def test_the_package_that_is_missing_is_named():
    config = LlamaConfig(quantization_config=COMPRESSED["int8"].config)
    found = refusal_of_quantization(config, is_installed=lambda module: False)
    assert found is not None and "install the package compressed-tensors, with which" in found


def edit_weights(folder: Path, **changed: torch.Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors") | changed
    present = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(present, folder / "model.safetensors", metadata={"format": "pt"})


def test_parts_of_no_product_are_refused(base, tmp_path):
    folder, _ = write_quantized(base, tmp_path, KINDS["awq"])
    edit_json(folder / "config.json", quantization_config=GPTQ)
    with pytest.raises(ExportError, match=r"_proj has quantized parts of shapes \{'qweight': \["):
        load_model(opened(folder))


UP = "model.layers.0.mlp.up_proj."
IN_FP8 = f"{UP}weight of shape [96, 64] is in FP8 with "
WRONG_WEIGHTS = [  # (kind, part of a product that is changed or, None, left out; words)
    (KINDS["fp8-blocks"], "weight_scale_inv", torch.ones(6, 9), IN_FP8 + "a scale of shape [6, 9]"),
    (KINDS["fp8-blocks"], "weight_scale_inv", None, IN_FP8 + "no scale"),
    (KINDS["awq"], "pre_scale", torch.ones(64), f"{UP}pre_scale has no place in the model"),
    (
        *(COMPRESSED["int4"], "weight_g_idx", torch.zeros(64, dtype=torch.int32)),
        f"in reordered groups ({UP}weight_g_idx)",
    ),
    (
        *(KINDS["gptq-v2"], "qzeros", torch.full((4, 12), -1, dtype=torch.int32)),
        f"{UP}qzeros has zero points of 0, which its format (gptq) cannot store",
    ),
]


@pytest.mark.parametrize(("kind", "part", "weight", "words"), WRONG_WEIGHTS)
def test_weights_that_contradict_their_form_are_refused(base, tmp_path, kind, part, weight, words):
    folder, _ = write_quantized(base, tmp_path, kind)
    if kind is KINDS["gptq-v2"]:  # whose zero points readers of GPTQ disagree on
        edit_json(folder / "config.json", quantization_config=GPTQ)
    edit_weights(folder, **{UP + part: weight})
    assert words in refusal(folder)


def test_a_bias_that_the_model_lacks_may_only_be_zero(base, tmp_path):
    folder, plain = write_quantized(base, tmp_path, KINDS["gptq"])
    name = "model.layers.0.mlp.up_proj.bias"
    edit_weights(folder, **{name: torch.zeros(96)})
    assert_same_weights(folder, plain)
    edit_weights(folder, **{name: torch.ones(96)})
    assert f"{name} has no place in the model" in refusal(folder)


def test_models_that_turn_their_weights_are_refused(tmp_path):
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": 300}
    base = write_checkpoint(tmp_path / "base", GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))
    kind = Kind(GPTQ, GPTQ_4, ("attn.c_proj.weight",))
    assert "transposed, unlike gptq" in refusal(write_quantized(base, tmp_path, kind)[0])


def test_quantized_weights_in_old_files_are_refused(base, tmp_path):
    folder, _ = write_quantized(base, tmp_path, KINDS["awq"])
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()
    assert "quantized weights are read only from safetensors" in refusal(folder)
