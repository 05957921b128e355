"""Forms of a product in which int8 rows and weights lose little: channels scaled, blocks rotated.

An int8 row has one scale (its largest magnitude divided by 127), or one scale per block of
channels. Real models have channels hundreds of times larger than the median channel (Dettmers et
al. 2022, LLM.int8()), so that few integers are left for the other channels. Apart from rounding,
these two transformations do not change a product:

    rows @ weight = (rows / s) @ (s * weight)            one number per channel (Xiao et al. 2022,
                                                         SmoothQuant)
    rows @ weight = (rows R) @ (R^T weight)              R orthogonal (Ashkboos et al. 2024, QuaRot)

s makes channels similar; dividing a norm's weight by s costs nothing at run time. ``FormChoice``
tries the forms on rows that a checkpoint computes for a text, and chooses the smallest error.
"""

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
from dsbd_export.passes.weighted_layers import weight_chunks
from dsbd_export.texts import readable_files, texts_of

_MOST_ROWS = 128  # kept rows of a run: 0.5 GB for 7 B parameters
_FIRST_WEIGHTS = 64


@dataclass(frozen=True)
class ProductRows:
    """Statistics of the rows of one product over a text."""

    rows: NDArray[np.float32]  # (n, in) float32. Some of the rows, evenly spread.
    # (in,) float32. The largest magnitude of every channel in all rows.
    largest: NDArray[np.float32]


RowsOfProducts = dict[bytes, ProductRows]
"""Statistics by the first weights of a product; see ``key_of``."""


def key_of(weight: NDArray[Any]) -> bytes:
    """Return the key of a product with weight (out, in): its first weights and its width."""
    first = np.ascontiguousarray(weight[0, :_FIRST_WEIGHTS], dtype=np.float32)
    return bytes(first.tobytes()) + int(weight.shape[1]).to_bytes(8, "little")


@contextmanager
def observed_rows(model: nn.Module) -> Iterator[RowsOfProducts]:
    """Yield statistics of every product's rows in runs in the block; the last run is used."""
    observed: RowsOfProducts = {}
    last: list[tuple[Tensor, ProductRows]] = []  # query, key and value multiply one tensor

    def observe(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        weight: Any = module.weight
        by_output = weight if isinstance(module, nn.Linear) else weight.T
        if not inputs[0].numel():
            return
        if not last or last[0][0] is not inputs[0]:
            rows = inputs[0].detach().float().reshape(-1, by_output.shape[1])
            last[:] = [(inputs[0], rows_of(rows.numpy()))]
        observed[key_of(by_output[:1].detach().float().numpy())] = last[0][1]

    hooks = []
    for module in model.modules():
        weight = getattr(module, "weight", None)
        is_product = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if is_product and isinstance(weight, Tensor) and weight.dim() == 2:
            hooks.append(module.register_forward_pre_hook(observe))
    try:
        yield observed
    finally:
        for hook in hooks:
            hook.remove()


def rows_of(rows: NDArray[np.float32]) -> ProductRows:
    """Return the statistics of rows (n, in)."""
    some = np.linspace(0, len(rows) - 1, min(len(rows), _MOST_ROWS)).astype(np.int64)
    return ProductRows(rows[some], np.abs(rows).max(0))


CALIBRATION_FILE = Path(__file__).parent / "calibration_text.txt"
_MOST_TOKENS = 512
_MOST_TEXTS = 32  # texts that share these tokens


def calibration_case(checkpoint: Checkpoint, data: Sequence[str]) -> ForestCase:
    """Return texts as one prefill whose head reads every row; ExportError if unreadable."""
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
    """Yield the beginning of each text; the text of a chat is all its messages."""
    for file in readable_files("calibration_texts", data):
        for _name, pieces in texts_of(file):
            if text := "\n".join(itertools.islice(pieces, _MOST_TOKENS)):
                yield text


_POWERS = (
    0.4,
    0.5,
    0.6,
    0.7,
    0.8,
)  # exponents of a channel's rows in s; its weights have 1 minus these
_EVEN = 1 + _POWERS.index(0.5)  # index in a list that begins with no scales
_BLOCKS = (64, 32, 16)
_TOLERABLE, _TOLERABLE_OF_HEADS = 5e-5, 1e-3
"""Errors (see ``int8_error``) up to which nothing is rotated: of other products, after attention.

Normally distributed numbers have 1.2e-4, rotated products of SmolLM2 3e-5 to 2e-4. An error after
attention changes the divergence a tenth as much as an equal error elsewhere, because little is
added to the residual there.
"""
_WORTH = 0.7  # a rotation is used if at most this share of the error remains
_QUIETEST = 0.1  # relative to the median channel: a silent channel may be louder in another text
_MOST_OUTPUTS = 256  # outputs of a product on which its error is computed


@dataclass(frozen=True)
class RowForm:
    """The form of a product's rows: divided by scales, then rotated in each block."""

    scales: NDArray[np.float32] | None = None  # (in,) float32, above 0; None: all 1
    # number of channels rotated together, a power of two that divides ``in``; 0: no rotation
    block: int = 0

    def of_rows(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return rows (n, in) in this form."""
        return self._rotated(rows if self.scales is None else rows / self.scales)

    def of_weight(self, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the weight (out, in) for rows in this form."""
        return self._rotated(weight if self.scales is None else weight * self.scales)

    def weight_of(self, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the original weight (out, in) for a result of ``of_weight``."""
        turned = self._rotated(weight)
        return turned if self.scales is None else turned / self.scales

    def _rotated(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        if not self.block:
            return rows
        blocks = rows.reshape(len(rows), -1, self.block) @ rotation(self.block)
        return np.asarray(blocks.reshape(rows.shape), np.float32)


AS_IT_IS = RowForm()


def rotation(block: int) -> NDArray[np.float32]:
    """Return the Hadamard matrix (block, block) divided by sqrt(block): symmetric, self-inverse.

    2 gives [[1, 1], [1, -1]] / 1.414.
    """
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.asarray(matrix / np.sqrt(block), np.float32)


def block_of(num_channels: int) -> int:
    """Return how many channels to rotate together, 0 if they do not form two equal blocks."""
    fitting = (size for size in _BLOCKS if num_channels % size == 0 and num_channels // size >= 2)
    return next(fitting, 0)


@dataclass(frozen=True)
class FormChoice:
    """Chooses forms of products; ``shared`` channels of a row share a scale, or all (None)."""

    shared: int | None = None

    def form(
        self,
        seen: ProductRows,
        weight: NDArray[Any],
        *,
        can_scale: bool,
        can_rotate: bool,
        is_after_attention: bool = False,
        is_head: bool = False,
        is_looked_up: bool = False,
    ) -> RowForm:
        """Return the form of a product (out, in) with the smallest error.

        is_after_attention: the rows are the output of attention heads. is_head: the products are
            logits. is_looked_up: rows of the weight are also embeddings of tokens.
        """
        largest = np.maximum(weight.max(0), -weight.min(0)).astype(np.float32)
        if is_head:
            some = _likely_outputs(weight, seen.rows)
        else:  # outputs on which the error is computed
            places = np.linspace(0, len(weight) - 1, min(len(weight), _MOST_OUTPUTS))
            some = np.asarray(weight[places.astype(np.int64)], np.float32)
        scales: list[NDArray[np.float32] | None] = [None]
        if can_scale:
            scales += [_channel_scales(seen.largest, largest, power) for power in _POWERS]

        def best(forms: list[RowForm]) -> tuple[float, RowForm]:
            errors = [int8_error(each, seen.rows, some, self.shared) for each in forms]
            if is_looked_up:
                for index, each in enumerate(forms):
                    stored = _as_int8(each.of_weight(some), self.shared)
                    errors[index] += _mean_error(each.weight_of(stored), some, 0)
            chosen = int(np.argmin(errors))
            return errors[chosen], forms[chosen]

        error, form = best([RowForm(each) for each in scales])
        block = block_of(weight.shape[1])
        tolerable = _TOLERABLE_OF_HEADS if is_after_attention else _TOLERABLE
        if can_rotate and block and error > tolerable:
            # Before a rotation even powers are about as good as the best.
            tried = [form.scales, *scales[_EVEN : _EVEN + 1]]
            rotated = best([RowForm(each, block) for each in tried])
            if rotated[0] < _WORTH * error:
                return rotated[1]
        return form


def _likely_outputs(weight: NDArray[Any], rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the outputs of a head (out, in) that are most likely for rows (n, in)."""
    num_best = min(max(_MOST_OUTPUTS // len(rows), 1), len(weight))
    logits = np.empty((len(rows), len(weight)), np.float32)
    for outputs in weight_chunks(weight.shape):
        logits[:, outputs] = rows @ np.asarray(weight[outputs], np.float32).T
    likely = np.unique(np.argpartition(logits, -num_best, axis=1)[:, -num_best:])
    return np.asarray(weight[likely], np.float32)


def _channel_scales(
    rows: NDArray[np.float32], weights: NDArray[np.float32], power: float
) -> NDArray[np.float32]:
    """Return rows^power / weights^(1 - power), (in,), scaled to the geometric mean 1."""
    loud, heavy = (np.maximum(each, _quietest(each)) for each in (rows, weights))
    logs = power * np.log(loud) - (1 - power) * np.log(heavy)
    return np.asarray(np.exp(logs - logs.mean()), np.float32)


def _quietest(channels: NDArray[np.float32]) -> float:
    """Return the magnitude below which a channel is treated as silent; padding is ignored."""
    heard = channels[channels > 0]
    return _QUIETEST * float(np.median(heard)) if heard.size else 1.0


def int8_error(
    form: RowForm, rows: NDArray[np.float32], weight: NDArray[np.float32], shared: int | None = None
) -> float:
    """Return the mean over rows of the squared error of an int8 product divided by its square.

    rows: (n, in). weight: (out, in). shared: see ``FormChoice``.
    """
    product = _as_int8(form.of_rows(rows), shared) @ _as_int8(form.of_weight(weight), shared).T
    return _mean_error(product, rows @ weight.T, 1)


def _mean_error(actual: NDArray[np.float32], expected: NDArray[np.float32], axis: int) -> float:
    errors, squares = np.square(actual - expected).sum(axis), np.square(expected).sum(axis)
    return float((errors / np.maximum(squares, 1e-30)).mean())


def _as_int8(rows: NDArray[np.float32], shared: int | None) -> NDArray[np.float32]:
    """Return rows (n, in) rounded to int8; ``shared`` channels share a scale (None: all)."""
    size = rows.shape[1]
    padding = 0 if shared is None else -size % shared
    blocks = np.pad(rows, [(0, 0), (0, padding)]).reshape(len(rows), -1, shared or size)
    scales = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    scales = np.maximum(scales, np.float32(1e-30))
    return np.asarray((np.rint(blocks / scales) * scales).reshape(len(rows), -1)[:, :size])
