"""Forwards of an engine, without a request, and what they cost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from dsbd_forward.forward import Forward, ForwardResult
from dsbd_forward.logits import TopLogits
from dsbd_runtime.engine.causal_lm import CausalLM

_QUIET, _VERBOSE = 3, 0


def append(model: CausalLM, num_rows: int) -> ForwardResult:
    """Append rows that see all before them."""
    first = model.num_rows
    return model.forward(
        Forward(
            token_ids=(np.arange(num_rows) * 7 + first) % model.spec.vocab_size,
            positions=np.arange(first, first + num_rows),
            mask=np.tri(num_rows, first + num_rows, first, dtype=np.bool_),
            logit_rows=np.arange(num_rows),
        )
    )


def forward(model: CausalLM, num_rows: int) -> NDArray[Any]:
    """Append rows that see all before them; return their logits, or the largest and the sum.

    Tokens of a top-k head are left out: of near-ties either may be first.
    """
    logits = append(model, num_rows).logits
    if isinstance(logits, TopLogits):
        return np.column_stack([logits.top_logits, logits.logsumexp])
    assert logits.whole is not None
    return logits.whole


@dataclass
class Counts:
    """Launches on the device, and copies to and from it."""

    dispatches: int = 0
    uploads: int = 0
    downloads: int = 0


@contextlib.contextmanager
def counted(capfd: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> Iterator[Counts]:
    """Count all of a block; the counts are complete after it."""
    found = Counts()

    def counting(owner: Any, name: str, field: str) -> None:
        plain = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            setattr(found, field, getattr(found, field) + 1)
            return plain(*args, **options)

        patched.setattr(owner, name, call)

    with patch.context() as patched:
        counting(onnxruntime.OrtValue, "update_inplace", "uploads")
        counting(onnxruntime.OrtValue, "numpy", "downloads")
        counting(onnxruntime, "copy_tensors", "downloads")
        capfd.readouterr()
        onnxruntime.set_default_logger_severity(_VERBOSE)
        onnxruntime.set_default_logger_verbosity(1)
        try:
            yield found
        finally:
            onnxruntime.set_default_logger_severity(_QUIET)
    found.dispatches = capfd.readouterr().err.count("Starting program")
