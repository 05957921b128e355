"""Options that cannot be are refused at once, with the fix."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_runtime.errors import DsbdError

REFUSED = [  # (option, value, words of the message)
    ("dtype", "fp8", "dtype='fp8' is not known; use one of fp32, fp16, bf16"),
    ("logits", "all", "use auto, full, or topk:K"),
    ("quantize", "int3", "use one of none, int8-dynamic, int8, int4"),
    ("max_kl", 0.5, "max_kl=0.5 has no meaning for dtype='fp32' with quantize='none'; use atol"),
    ("max_kl", -1.0, "max_kl=-1.0 is no error limit"),
    ("logits", "topk:0", "logits='topk:0' is no kind of output; use auto, full, or topk:K"),
    ("engine", "openvino", "engine='openvino' is not known; use one of onnx, tensorrt, "),
    ("atol", 0.0, "atol=0.0 is no error limit"),
    ("atol", float("nan"), "atol=nan"),
    ("atol", float("inf"), "atol=inf"),
    ("max_context", 15, "max_context=15 is too short; use at least 16"),
]


@pytest.mark.parametrize(("option", "value", "words"), REFUSED)
def test_refused_options(option, value, words):
    with pytest.raises(ExportError) as caught:
        ExportConfig(target="t", draft="d", output=Path("b"), **{option: value})
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, DsbdError)


MEANINGLESS = [  # (options, words of the message)
    ({"calibration_texts": ("a",)}, "calibration_texts='a' has no meaning with quantize='none'"),
    ({"quantize": "int8-dynamic", "dtype": "fp16"}, "no form in dtype='fp16'; use dtype='fp32'"),
    ({"quantize": "int4", "dtype": "bf16"}, "use dtype='fp32' or 'fp16', or quantize='none'"),
    ({"quantize": "int8", "atol": 0.1}, "atol=0.1 has no meaning"),
    ({"dtype": "fp16", "atol": 0.1}, "use max_kl"),
]


@pytest.mark.parametrize(("options", "words"), MEANINGLESS)
def test_refused_combinations(options, words):
    with pytest.raises(ExportError) as caught:
        ExportConfig(target="t", draft="d", output=Path("b"), **options)
    assert words in str(caught.value)


def test_the_config_does_not_change():
    config = ExportConfig(target="t", draft="d", output=Path("b"))
    with pytest.raises(FrozenInstanceError):
        config.atol = 1.0


AUTO_LOGITS = [  # (options, vocabulary, logits)
    ({}, 16_383, "full"),
    ({}, 16_384, "topk:64"),
    ({"draft": "d", "draft_vocab": 32}, 50_000, "topk:32"),
    ({"logits": "full"}, 50_000, "full"),
    ({"logits": "topk:8"}, 300, "topk:8"),
    ({"logits": "gather"}, 50_000, "gather"),
    ({"engine": "tensorrt", "dtype": "fp16"}, 50_000, "full"),
]


@pytest.mark.parametrize(("options", "vocab_size", "logits"), AUTO_LOGITS, ids=str)
def test_logits_are_chosen_by_the_vocabulary(options, vocab_size, logits, tmp_path):
    config = ExportConfig(target="t", output=tmp_path, **options)
    chosen = config.for_vocabulary(vocab_size)
    assert chosen.logits == logits and chosen.of_draft.logits == logits
    if config.logits == "auto":  # rules over the times of a speech model sum over all of them
        assert config.for_vocabulary(vocab_size, reads_all=True).logits == "full"
