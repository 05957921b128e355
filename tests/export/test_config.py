"""Options that cannot be are refused at once, with the fix; versions of tools that were tried."""

import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from dsbd_export.config import DraftConfig, ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.tool_versions import TRIED_VERSIONS, tool_versions, tried_range, untried_versions
from dsbd_runtime.errors import DsbdError

REFUSED: list[tuple[dict[str, Any], str]] = [  # (options, words of the message)
    ({"dtype": "fp8"}, "dtype='fp8' is not known; use one of fp32, fp16, bf16"),
    ({"quantize": "int3"}, "use one of none, int8, int8-blocks, int8-dynamic, int4"),
    ({"form": "rocm"}, "form='rocm' is not known; use one of portable, cuda, webgpu"),
    ({"attention": "flash"}, "attention='flash' is not known; use one of fused, gr"),
    ({"engine": "openvino"}, "engine='openvino' is not known; use one of onnx, tensorrt, "),
    ({"max_kl": 0.5}, "max_kl=0.5 has no meaning for dtype='fp32' with quantize='none'; use atol"),
    ({"max_kl": -1.0}, "max_kl=-1.0 is no error limit"),
    ({"atol": 0.0}, "atol=0.0 is no error limit"),
    ({"atol": float("nan")}, "atol=nan"),
    ({"atol": float("inf")}, "atol=inf"),
    ({"max_context": 15}, "max_context=15 is too short; use at least 16"),
    *(
        ({"num_threads": number}, f"num_threads={number} is out of range; use 1 to")
        for number in (0, -1, 10_000)
    ),
    *(
        ({"logits": kind}, f"logits='{kind}' is no kind of output; use auto, full, or topk:K")
        for kind in ("all", "topk", "topk:0", "topk:-3", "topk:x", "TOPK:4", "none", "")
    ),
    ({"calibration_texts": ("a",)}, "calibration_texts='a' has no meaning with quantize='none'"),
    ({"quantize": "int8-dynamic", "dtype": "fp16"}, "no form in dtype='fp16'; use dtype='fp32'"),
    ({"quantize": "int4", "dtype": "bf16"}, "use dtype='fp32' or 'fp16', or quantize='none'"),
    ({"quantize": "int8", "atol": 0.1}, "atol=0.1 has no meaning"),
    ({"dtype": "fp16", "atol": 0.1}, "use max_kl"),
    ({"form": "cuda", "engine": "tensorrt"}, "form='cuda' has operators of ONNX Runtime"),
    ({"form": "cuda", "attention": "exact"}, "form='cuda' is for a GPU"),
    ({"form": "cuda", "quantize": "int8-dynamic"}, "form='cuda' is for a GPU"),
    ({"form": "webgpu", "engine": "tensorrt"}, "form='webgpu' has operators of ONNX Runtime"),
    ({"form": "webgpu", "dtype": "bf16"}, "form='webgpu' has no bf16, as WebGPU; use dtype='fp16'"),
    ({"form": "webgpu", "quantize": "int8-dynamic"}, "MatMulInteger), which quantize='int8-dynam"),
    ({"form": "webgpu", "draft_quantize": "int8-dynamic"}, "use quantize='int8', which is blocks"),
    ({"form": "webgpu", "quantize": "int4", "attention": "exact"}, "products of 4 bits depend on"),
    ({"form": "webgpu", "attention": "exact", "atol": 0.1}, "atol=0.1 has no meaning"),
    *(
        ({"attention": "exact", **options}, f"attention='exact' has no form for {named}")
        for options, named in (
            ({"quantize": "int4", "dtype": "fp16"}, "dtype='fp16'"),
            ({"dtype": "fp16"}, "dtype='fp16'"),
            ({"engine": "tensorrt"}, "engine='tensorrt'"),
        )
    ),
    (
        {"features": True, "dtype": "fp16", "engine": "tensorrt"},
        "features=True has no form for engine='tensorrt'",
    ),
    ({"engine": "onnx", "capacity": 512}, "capacity=512 has no meaning for engine='onnx'"),
    ({"compute_capability": "12.0"}, "compute_capability='12.0' has no meaning"),
    ({"engine": "tensorrt-rtx", "quantize": "int8"}, "runs on ONNX Runtime only"),
    ({"engine": "tensorrt-rtx", "compute_capability": "sm_120"}, "use one like 12.0"),
    ({"engine": "tensorrt-rtx", "capacity": 255}, "multiple of 64, 256 or more"),
    ({"engine": "tensorrt-rtx", "capacity": 300}, "multiple of 64, 256 or more"),
    ({"draft": None, "draft_adapter": "x"}, "draft_adapter='x' has no meaning without a draft"),
    ({"draft_vocab": 31}, "draft_vocab=31 is too few with logits='auto'; use at least 32"),
    (
        {"draft_vocab": 63, "logits": "topk:64"},
        "draft_vocab=63 is too few with logits='topk:64'; use at least 64",
    ),
    ({"draft_texts": ("a",)}, "draft_texts='a' has no meaning without draft_vocab"),
    ({"draft": None, "draft_vocab": 64}, "draft_vocab=64 has no meaning without a draft"),
    ({"draft": None, "draft_quantize": "int8"}, "draft_quantize='int8' has no meaning without"),
    ({"draft_quantize": "int3"}, "draft_quantize, of the draft: quantize='int3' is not known"),
    (
        {"draft_quantize": "int8-dynamic", "dtype": "fp16"},
        "draft_quantize, of the draft: quantize='int8-dynamic' has no form in dtype='fp16'",
    ),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_refused_options(options, words):
    with pytest.raises(ExportError) as caught:
        ExportConfig(**{"target": "t", "draft": "d", "output": Path("b"), **options})
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, DsbdError)


def test_the_draft_of_a_bundle_has_its_precision_under_either_name():
    found = {
        DraftConfig(bundle=Path("b"), draft="d", max_kl=0.5, **{name: "int8"})
        .for_vocabulary(50_000)
        .quantization
        for name in ("quantize", "draft_quantize")
    }
    assert found == {"int8-dynamic"}
    with pytest.raises(
        ExportError, match="='int8' and draft_quantize='int4' are both of the draft"
    ):
        DraftConfig(bundle=Path("b"), draft="d", quantize="int8", draft_quantize="int4")


def test_the_config_does_not_change():
    config = ExportConfig(target="t", draft="d", output=Path("b"))
    with pytest.raises(FrozenInstanceError):
        config.atol = 1.0


QUANTIZATIONS = [  # (options, the kind in the manifest, whether rows are rounded to int8)
    ({"quantize": "int8"}, "int8-dynamic", True),
    ({"quantize": "int8-dynamic"}, "int8-dynamic", True),
    ({"quantize": "int8-blocks"}, "int8", True),
    ({"quantize": "int8", "dtype": "fp16"}, "int8", False),
    ({"quantize": "int8", "form": "cuda"}, "int8", False),
    ({"quantize": "int8", "form": "webgpu"}, "int8", False),
    ({"quantize": "int8-blocks", "form": "webgpu"}, "int8", False),
    ({"quantize": "int8-blocks", "dtype": "fp16"}, "int8", False),
    ({"quantize": "int4"}, "int4", False),
    ({"quantize": "int4", "dtype": "fp16"}, "int4-symmetric", False),
    ({"draft_quantize": "int8", "draft": "d"}, "none", False),
]


@pytest.mark.parametrize(("options", "form", "rounds"), QUANTIZATIONS, ids=str)
def test_eight_bits_mean_what_the_processor_multiplies_well(options, form, rounds, tmp_path):
    config = ExportConfig(target="t", output=tmp_path, **options)
    assert (config.quantized_form, config.rounds_rows) == (form, rounds)
    assert config.attention_form == ("exact" if rounds else "fused")
    if config.draft is not None:
        assert config.of_draft.quantized_form == "int8-dynamic"


AUTO_LOGITS = [  # (options, vocabulary, logits)
    ({}, 16_383, "full"),
    ({}, 16_384, "topk:64"),
    ({"draft": "d", "draft_vocab": 32}, 50_000, "topk:32"),
    ({"logits": "full"}, 50_000, "full"),
    ({"logits": "topk:8"}, 300, "topk:8"),
    ({"engine": "tensorrt", "dtype": "fp16"}, 50_000, "full"),
]


@pytest.mark.parametrize(("options", "vocab_size", "logits"), AUTO_LOGITS, ids=str)
def test_logits_are_chosen_by_the_vocabulary(options, vocab_size, logits, tmp_path):
    config = ExportConfig(target="t", output=tmp_path, **options)
    chosen = config.for_vocabulary(vocab_size)
    assert chosen.logits == logits and chosen.of_draft.logits == logits
    if config.logits == "auto":  # rules over the times of a speech model sum over all of them
        assert config.for_vocabulary(vocab_size, reads_all=True).logits == "full"


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("library", TRIED_VERSIONS)
def test_the_range_is_the_same_everywhere(library):
    oldest, newest = TRIED_VERSIONS[library]
    assert f'"{library}>={oldest}' in (ROOT / "pyproject.toml").read_text()
    constraints = (ROOT / "constraints.txt").read_text()
    assert re.search(rf"^{library}=={re.escape(newest)}\.\d+$", constraints, re.MULTILINE)
    assert f"{library} {tried_range(library)}" in (ROOT / "docs" / "export.md").read_text()


def test_what_is_installed_was_tried():
    assert untried_versions(tool_versions()) == []


@pytest.mark.parametrize(
    ("version", "is_tried"),
    [("5.23.9", False), ("5.24.0", True), ("5.24.7", True), ("5.100.0", False), ("unknown", True)],
)
def test_other_versions_are_named(version, is_tried):
    warnings = untried_versions({"transformers": version, "onnxruntime": "1.32.0"})
    assert len(warnings) == (not is_tried)
    assert all(f"transformers {version} was not tested, 5.24 was" in w for w in warnings)
