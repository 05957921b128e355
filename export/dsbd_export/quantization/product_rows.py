"""Rows of products, and the text by which a checkpoint makes them."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_export.parity_cases import ForestCase, own_text_ids, prefill_case, text_ids
from dsbd_export.texts import readable_files, texts_of

_MOST_ROWS = 128  # of a run that are kept: of 7 B parameters 0.5 GB
_FIRST_WEIGHTS = 64


@dataclass(frozen=True)
class ProductRows:
    """Statistics of the rows of one product, seen over a text."""

    rows: NDArray[np.float32]  # (n, in) float32. Some of them, evenly spread.
    # (in,) float32. The largest magnitude of every channel, in all of them.
    largest: NDArray[np.float32]


RowsOfProducts = dict[bytes, ProductRows]
"""Rows by the first weights of a product; see ``key_of``."""


def key_of(weight: NDArray[Any]) -> bytes:
    """Return the key of a product with weight (out, in): its first weights, and its width."""
    first = np.ascontiguousarray(weight[0, :_FIRST_WEIGHTS], dtype=np.float32)
    return bytes(first.tobytes()) + int(weight.shape[1]).to_bytes(8, "little")


@contextmanager
def observed_rows(model: nn.Module) -> Iterator[RowsOfProducts]:
    """Yield the rows of every product of the runs in the block; the last run counts."""
    found: RowsOfProducts = {}
    last: list[tuple[Tensor, ProductRows]] = []  # query, key and value multiply one tensor

    def observe(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        weight: Any = module.weight
        by_output = weight if isinstance(module, nn.Linear) else weight.T
        if not inputs[0].numel():
            return
        if not last or last[0][0] is not inputs[0]:
            rows = inputs[0].detach().float().reshape(-1, by_output.shape[1])
            last[:] = [(inputs[0], rows_of(rows.numpy()))]
        found[key_of(by_output[:1].detach().float().numpy())] = last[0][1]

    products = [module for module in model.modules() if _is_product(module)]
    hooks = [module.register_forward_pre_hook(observe) for module in products]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def rows_of(rows: NDArray[np.float32]) -> ProductRows:
    """Return the statistics of rows (n, in)."""
    some = np.linspace(0, len(rows) - 1, min(len(rows), _MOST_ROWS)).astype(np.int64)
    return ProductRows(rows[some], np.abs(rows).max(0))


def _is_product(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    is_matrix = isinstance(weight, Tensor) and weight.dim() == 2
    return is_matrix and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")


CALIBRATION_FILE = Path(__file__).parent / "calibration_text.txt"
_MOST_TOKENS = 512
_MOST_TEXTS = 32  # which share them


def calibration_case(checkpoint: Checkpoint, data: Sequence[str]) -> ForestCase:
    """Return text that the checkpoint reads once, as one prefill; the head reads every row.

    Raises ExportError if they are no readable texts.
    """
    if data:
        texts = list(itertools.islice(_texts(data), _MOST_TEXTS))
        if not texts:
            raise ExportError(f"calibration_texts={data[0]!r} has no text; give a file with some")
        token_ids = text_ids(checkpoint, texts, _MOST_TOKENS)
    else:
        token_ids = own_text_ids(checkpoint, CALIBRATION_FILE, _MOST_TOKENS)
    case = prefill_case(checkpoint, token_ids)
    return dataclasses.replace(case, rows=np.arange(len(case.node_ids)))


def _texts(data: Sequence[str]) -> Iterator[str]:
    """Yield the beginning of each text; of a chat, all that is said in it."""
    for file in readable_files("calibration_texts", data):
        for _name, pieces in texts_of(file):
            if text := "\n".join(itertools.islice(pieces, _MOST_TOKENS)):
                yield text
