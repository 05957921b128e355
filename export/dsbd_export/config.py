"""The options of one export."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from dsbd_export.errors import ExportError

MIN_CONTEXT = 16  # the parity gate needs a prompt and a tree of three levels

_ONLY_VALUES = {"dtype": "fp32", "quantize": "none", "logits": "full", "engine": "onnx"}


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What to export, to where, and how exact it has to be.

    Attributes:
        target: folder or Hugging Face hub id of the target checkpoint.
        draft: the same for the draft.
        output: folder of the bundle; an existing bundle there is replaced at the end.
        dtype: precision of weights and caches: "fp32".
        quantize: weight compression: "none".
        logits: what the engines return: "full".
        engine: "onnx".
        atol: largest absolute logit error that the parity gate lets pass.
        max_context: upper limit of the context length, None for that of the checkpoint.
        revision: branch, tag or commit of the checkpoints that come from the hub.
        trust_remote_code: run modelling code that a checkpoint brings along.
    """

    target: str
    draft: str
    output: Path
    dtype: str = "fp32"
    quantize: str = "none"
    logits: str = "full"
    engine: str = "onnx"
    atol: float = 1e-4
    max_context: int | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for field, only in _ONLY_VALUES.items():
            if (value := getattr(self, field)) != only:
                raise ExportError(f"{field}={value!r} is not supported yet; use {field}={only!r}")
        if not (self.atol > 0 and math.isfinite(self.atol)):
            raise ExportError(f"atol={self.atol} is no error limit; use a number above 0, as 1e-4")
        if self.max_context is not None and self.max_context < MIN_CONTEXT:
            raise ExportError(
                f"max_context={self.max_context} is too short; use at least {MIN_CONTEXT}"
            )
