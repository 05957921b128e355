"""Head: the logits that an engine returns, either all logits of a row or the largest ones.

| tensor | shape, type | meaning |
|---|---|---|
| logit_rows | [R] int64 | the nodes, of S, whose logits are returned |
| logits | [R,V] float32 | |

The manifest names the head: "full" for all logits, or "topk:64" for an engine with a top-k head. A
top-k head returns for each row its K largest logits in decreasing order, and the log of the sum of
exp(logit) over all V tokens. Log-probabilities follow from these without a row of V numbers. The
outputs are top_logits [R,K] float32, top_ids [R,K] int64 and logsumexp [R] float32. If the manifest
says ``full_logits``, the graph also has the output logits, the tensor that the head reads. A host
leaves it with the engine and copies only the rows or numbers that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.logits import DenseLogits, Logits, TopLogits
from dsbd_forward.rows import Ints
from dsbd_forward.spec import HeadSpec
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.head.forward_checks import check_array, check_range
from dsbd_runtime.parts.head.full_logits import DeviceLogits, HostLogits
from dsbd_runtime.parts.host_binder import HeadOutput
from dsbd_runtime.parts.part import (
    FLOAT32,
    INT64,
    Call,
    DevicePlace,
    GraphContract,
    HostPlace,
    Part,
    PartEntry,
    Tensors,
    TensorSpec,
)

LOGIT_ROWS = "logit_rows"
LOGITS = "logits"
TOP_LOGITS = "top_logits"
TOP_IDS = "top_ids"
LOGSUMEXP = "logsumexp"

FULL = "full"
_TOP_PREFIX = "topk:"
_TYPES: dict[type[np.generic], str] = {np.float32: FLOAT32, np.int64: INT64}
_KEPT_ROWS = "kept rows"  # key among a call's outputs: where each row's full logits are kept


def parse_num_top_logits(kind: str) -> int:
    """Return K of "topk:K", 0 of "full"; raise ValueError for any other text."""
    if kind == FULL:
        return 0
    digits = kind.removeprefix(_TOP_PREFIX)
    if digits == kind or not (digits.isascii() and digits.isdigit()) or digits[0] == "0":
        raise ValueError(f"{kind!r} is neither {FULL!r} nor {_TOP_PREFIX}K with K at least 1")
    return int(digits)


def head_outputs(kind: str, vocab_size: int) -> tuple[HeadOutput, ...]:
    """Return the outputs that a forward copies from an engine with a head of this kind."""
    num_top_logits = parse_num_top_logits(kind)
    if not num_top_logits:
        return (full_output(vocab_size),)
    return (
        HeadOutput(TOP_LOGITS, np.float32, (num_top_logits,)),
        HeadOutput(TOP_IDS, np.int64, (num_top_logits,)),
        HeadOutput(LOGSUMEXP, np.float32, ()),
    )


def full_output(vocab_size: int) -> HeadOutput:
    """Return the output of all logits."""
    return HeadOutput(LOGITS, np.float32, (vocab_size,))


@dataclass(frozen=True, kw_only=True)
class HeadEntry(PartEntry):
    """The head in the manifest; ``full_logits``: whether the graph has the output ``logits``."""

    kind: str
    vocab_size: int
    full_logits: bool = True

    @property
    def outputs(self) -> tuple[HeadOutput, ...]:
        return head_outputs(self.kind, self.vocab_size)

    @property
    def keeps_full(self) -> bool:
        """Whether all logits stay with the engine until rows of them are read."""
        return self.full_logits and self.kind != FULL

    @property
    def spec(self) -> Mapping[str, Any]:
        number = parse_num_top_logits(self.kind)
        return {"head": HeadSpec(num_top_logits=number, keeps_full_logits=self.keeps_full)}

    def contract(self) -> GraphContract:
        inputs: Tensors = {LOGIT_ROWS: TensorSpec(INT64, ("R",))}
        kept = (full_output(self.vocab_size),) if self.keeps_full else ()
        outputs = {
            output.name: TensorSpec(_TYPES[output.dtype], ("R", *output.row_shape))
            for output in (*self.outputs, *kept)
        }
        return GraphContract(inputs=inputs, outputs=outputs)

    def on_host(self, place: HostPlace) -> Head:
        others = [output for part in place.opened for output in part.returns]
        return self._opened(HostLogits, others)

    def on_device(self, place: DevicePlace) -> Head:
        return self._opened(partial(DeviceLogits, place.device), [])

    def _opened(self, memory: Callable[[HeadOutput], FullMemory], others: list[HeadOutput]) -> Head:
        full = memory(full_output(self.vocab_size)) if self.keeps_full else None
        return (Head if self.kind == FULL else TopHead)(self, full, others)


FullMemory = HostLogits | DeviceLogits
"""Memory of all logits of an engine's last forward."""


class Head(Part):
    """The head of an engine: all logits of each row."""

    def __init__(self, entry: HeadEntry, full: FullMemory | None, others: list[HeadOutput]) -> None:
        self.full = full
        self._outputs = (*entry.outputs, *others)
        self._others = [output.name for output in others]
        self.num_forwards = 0  # forwards that have begun
        self._bound = 0, -1  # first row and number of rows that are bound in ``full``
        self._place: Ints | None = None  # if logit rows repeat: each one's row among the distinct

    def bind(self, call: Call, binder: Any) -> None:
        self.num_forwards += call.is_first
        rows = call.forward.logit_rows
        if len(rows) > call.num_new or self._place is not None:
            rows = self._distinct(call)
        binder.write({LOGIT_ROWS: rows})
        binder.returns(self._outputs, len(rows))
        # full logits of a call are kept after those of the calls before it
        first = int(np.count_nonzero(call.whole.logit_rows < call.start)) if call.start else 0
        bound = first, len(rows)
        if self.full is not None and (binder.is_cleared or bound != self._bound):
            self.full.bind(binder, *bound)
        self._bound = bound

    def collect(self, call: Call, outputs: dict[str, NDArray[Any]]) -> None:
        """Take the outputs of a call; after the forward's last rows, put the logits in place."""
        if self._place is not None or call.forward is not call.whole:
            first_row, num_rows = self._bound
            outputs = {**outputs, _KEPT_ROWS: np.arange(first_row, first_row + num_rows)}
        if self._place is not None:  # rows repeat
            outputs = {name: array[self._place] for name, array in outputs.items()}
        if call.forward is not call.whole:
            self._put(call, outputs)
            outputs = call.outputs
        if call.is_last:
            call.returned["logits"] = self._logits(call, outputs)
            for name in self._others:
                call.returned[name] = outputs[name]

    def close(self) -> None:
        self.num_forwards += 1
        if self.full is not None:
            self.full.close()

    def _logits(self, call: Call, outputs: dict[str, NDArray[Any]]) -> Logits:
        return DenseLogits(outputs[LOGITS])

    def _distinct(self, call: Call) -> Ints:
        """Return the rows whose logits a call returns, at most S: each repeated row once."""
        rows, self._place = call.forward.logit_rows, None
        if len(rows) > call.num_new:
            rows, self._place = np.unique(rows, return_inverse=True)
        return rows

    def _put(self, call: Call, outputs: dict[str, NDArray[Any]]) -> None:
        """Put the outputs of a call at their place in the outputs of the whole forward."""
        place = call.whole.logit_rows_in(call.start, call.start + call.num_new)  # (R,)
        for name, array in outputs.items():
            if name not in call.outputs:
                call.outputs[name] = np.empty((len(place), *array.shape[1:]), array.dtype)
            call.outputs[name][place] = array


class TopHead(Head):
    """A top-k head: the largest logits of each row; all logits may stay with the engine."""

    def _logits(self, call: Call, outputs: dict[str, NDArray[Any]]) -> Logits:
        tops = outputs[TOP_IDS], outputs[TOP_LOGITS], outputs[LOGSUMEXP]
        if self.full is None:
            return TopLogits(*tops)
        return TopLogits(*tops, KeptLogits(self, self.full, len(tops[0]), outputs.get(_KEPT_ROWS)))


class KeptLogits:
    """The ``FullLogits`` of an engine's last forward; they expire with its next forward."""

    def __init__(self, head: Head, full: FullMemory, num_rows: int, kept_rows: Ints | None) -> None:
        """Take the logits of R = ``num_rows`` logit rows.

        kept_rows: (R,) int64, where the logits of each logit row are kept; None: in order. With
            calls that begin at rows 0 and 256, the logit rows [299, 3, 255, 256] are kept in the
            order [3, 255, 299, 256], so kept_rows is [2, 0, 1, 3].
        """
        self._head = head
        self._full = full
        self._num_forwards = head.num_forwards
        self._num_rows = num_rows
        self._kept_rows = kept_rows

    def read(self, rows: Ints) -> NDArray[np.float32]:
        return self._full.read(self._kept(rows))

    def read_tokens(self, rows: Ints, token_ids: Ints) -> NDArray[np.float32]:
        return self._full.read_tokens(self._kept(rows), token_ids)

    def _kept(self, rows: Ints) -> Ints:
        """Return where these logit rows are kept; raise InputError if they have expired."""
        if self._head.num_forwards != self._num_forwards:
            raise InputError(
                "full logits are read after the model's next forward or its end, which overwrite "
                "them; read those of a forward before the next one"
            )
        check_array("rows", rows, np.dtype(np.int64), 1)
        check_range("rows", rows, self._num_rows)
        return rows if self._kept_rows is None else self._kept_rows[rows]
