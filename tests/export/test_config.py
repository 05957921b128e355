"""Options that cannot be are refused at once, with the mend."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_runtime.errors import DsbdError

REFUSED = [  # (option, value, words of the message)
    ("dtype", "fp16", "dtype='fp16' is not supported yet; use dtype='fp32'"),
    ("quantize", "int8", "use quantize='none'"),
    ("logits", "topk:8", "use logits='full'"),
    ("engine", "tensorrt", "use engine='onnx'"),
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


def test_the_config_does_not_change():
    config = ExportConfig(target="t", draft="d", output=Path("b"))
    with pytest.raises(FrozenInstanceError):
        config.atol = 1.0
