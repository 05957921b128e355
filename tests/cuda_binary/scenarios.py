"""What the tests do in the process that has the CUDA provider."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dsbd_errors import DsbdError
from dsbd_forward.forward import Forward
from dsbd_runtime.bundle import open_bundle
from dsbd_runtime.causal_lm import CausalLM
from dsbd_runtime.loading import load_causal_lm
from tests.cuda_binary.cuda_runtime import StandIn

_WAITS = ("wait ", "copy-and-wait ", "fill-and-wait ")


def open_model(standin: StandIn, path: str, role: str = "target", **options: Any) -> dict[str, Any]:
    """Open a model and close it; return the class and the text of the error, both empty without."""
    try:
        load_causal_lm(open_bundle(Path(path)), role, provider="cuda", **options).close()
    except DsbdError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": "", "text": ""}


def count_forwards(
    standin: StandIn, path: str, role: str, sizes: list[int], **options: Any
) -> list[dict[str, Any]]:
    """Return what a third forward of each number of rows does, and then a prune."""
    with load_causal_lm(open_bundle(Path(path)), role, provider="cuda", **options) as model:
        forward(model, 100)
        found = []
        for size in sizes:
            for _ in range(3):
                model.keep(np.arange(100))
                standin.take_log()
                forward(model, size)
            found.append(counts(standin.take_log()))
        for _ in range(3):
            forward(model, 3)
            standin.take_log()
            model.keep(np.delete(np.arange(model.num_rows), 98))
        found.append(counts(standin.take_log()))
        return found


def forward(model: CausalLM, num_rows: int) -> Any:
    """Append rows that see all before them; each has logits, at most 32."""
    first = model.num_rows
    mask = np.concatenate(
        [np.ones((num_rows, first), np.bool_), np.tri(num_rows, dtype=np.bool_)], axis=1
    )
    return model.forward(
        Forward(
            token_ids=np.arange(num_rows) % 3,
            positions=np.arange(first, first + num_rows),
            mask=mask,
            logit_rows=np.arange(min(num_rows, 32)),
        )
    )


def counts(log: list[str]) -> dict[str, int]:
    """Return launches, copies, waits, takes of memory, graphs launched and refusals of a log."""

    def count(*starts: str) -> int:
        return sum(line.startswith(starts) for line in log)

    return {
        "launches": count("kernel ", "product ", "graph "),
        "copies_in": sum(
            "pinned to device" in line or "pageable to device" in line for line in log
        ),
        "copies_out": sum("device to p" in line for line in log),
        "waits": count(*_WAITS),
        "takes": count("take "),
        "graphs": count("graph "),
        "refused": count("refused "),
    }
