"""Head: the logits that an engine returns, all of a row, the largest, or those of pairs.

| tensor | shape, type | meaning |
|---|---|---|
| logit_rows | [R] int64 | the nodes, of S, whose logits are returned |
| logits | [R,V] float32 | |

The manifest names the head: "full" for all logits, "topk:64" for an engine with a top-k head, or
"gather". A top-k head returns, of each row, its K largest logits in decreasing order and the log of
the sum of exp(logit) over all V tokens, from which log-probabilities follow without a row of V
numbers: top_logits [R,K] float32, top_ids [R,K] int64 and logsumexp [R] float32. Where the manifest
says ``full_logits`` it also has the output logits, the tensor that the head reads: a host leaves it
with the engine and copies the rows that it needs.

A gather head returns the logits of tokens that the host names, as many of a row as it likes: the
inputs gather_rows and gather_ids, [N] int64 each, say of which of the R rows and of which token.
Its outputs are gathered_logits [N] float32 and logsumexp [R] float32; logits is always there too.
A log-probability is a logit minus the logsumexp of its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.logits import DenseLogits, Gather, GatheredLogits, Logits, TopLogits
from dsbd_forward.rows import NO_INTS, Ints
from dsbd_forward.spec import HeadSpec
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.forward_checks import check_array, check_range
from dsbd_runtime.parts.full_logits import DeviceLogits, HostLogits, KeptLogits
from dsbd_runtime.parts.part import (
    FLOAT32,
    INT64,
    Binder,
    Call,
    DevicePlace,
    GraphContract,
    HeadOutput,
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
GATHER_ROWS = "gather_rows"
GATHER_IDS = "gather_ids"
GATHERED_LOGITS = "gathered_logits"

FULL = "full"
GATHER = "gather"
_TOP_PREFIX = "topk:"
_TYPES: dict[type[np.generic], str] = {np.float32: FLOAT32, np.int64: INT64}
_NO_PAIRS = Gather(NO_INTS, NO_INTS)


def parse_num_top_logits(kind: str) -> int:
    """Return K of "topk:K", 0 of "full" and "gather"; raise ValueError for any other text."""
    if kind in (FULL, GATHER):
        return 0
    digits = kind.removeprefix(_TOP_PREFIX)
    if digits == kind or not (digits.isascii() and digits.isdigit()) or digits[0] == "0":
        raise ValueError(
            f"{kind!r} is neither {FULL!r} nor {_TOP_PREFIX}K with K at least 1, nor {GATHER!r}"
        )
    return int(digits)


def head_outputs(kind: str, vocab_size: int) -> tuple[HeadOutput, ...]:
    """Return the outputs that a forward copies from an engine that returns ``kind``."""
    num_top_logits = parse_num_top_logits(kind)
    if kind == GATHER:
        return (
            HeadOutput(GATHERED_LOGITS, np.float32, (), by_pair=True),
            HeadOutput(LOGSUMEXP, np.float32, ()),
        )
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
    """Description of the head in the manifest.

    Attributes:
        kind: "full", "topk:K" or "gather".
        full_logits: whether the graph has the output ``logits``.
    """

    kind: str
    vocab_size: int
    full_logits: bool = True

    @property
    def outputs(self) -> tuple[HeadOutput, ...]:
        """The outputs that every forward copies."""
        return head_outputs(self.kind, self.vocab_size)

    @property
    def keeps_full(self) -> bool:
        """Whether all logits stay with the engine until rows of them are read."""
        return self.full_logits and self.kind != FULL

    @property
    def gathers(self) -> bool:
        """Whether it returns the logits of pairs."""
        return self.kind == GATHER

    @property
    def spec(self) -> Mapping[str, Any]:
        """See PartEntry."""
        number = parse_num_top_logits(self.kind)
        keeps_full = number > 0 and self.keeps_full
        return {
            "head": HeadSpec(
                num_top_logits=number, keeps_full_logits=keeps_full, gathers_logits=self.gathers
            )
        }

    def contract(self) -> GraphContract:
        """See PartEntry."""
        inputs: Tensors = {LOGIT_ROWS: TensorSpec(INT64, ("R",))}
        if self.gathers:
            inputs |= dict.fromkeys((GATHER_ROWS, GATHER_IDS), TensorSpec(INT64, ("N",)))
        kept = (full_output(self.vocab_size),) if self.keeps_full else ()
        outputs = {
            output.name: TensorSpec(
                _TYPES[output.dtype], ("N" if output.by_pair else "R", *output.row_shape)
            )
            for output in (*self.outputs, *kept)
        }
        return GraphContract(inputs=inputs, outputs=outputs)

    def on_host(self, place: HostPlace) -> Head:
        """See PartEntry."""
        others = [output for part in place.opened for output in part.returns]
        return self._opened(HostLogits, others)

    def on_device(self, place: DevicePlace) -> Head:
        """See PartEntry."""
        return self._opened(partial(DeviceLogits, place.device), [])

    def _opened(self, memory: Callable[[HeadOutput], FullMemory], others: list[HeadOutput]) -> Head:
        full = memory(full_output(self.vocab_size)) if self.keeps_full else NO_FULL
        return {FULL: Head, GATHER: GatherHead}.get(self.kind, TopHead)(self, full, others)


class FullMemory(Protocol):
    """Memory of all logits of an engine's last call."""

    def bind(self, binder: Any, num_logit_rows: int) -> None:
        """Let the next call write the logits of R rows."""

    def read(self, rows: Ints) -> NDArray[np.float32]:
        """Return a copy of some of the last call's R rows, (n, V)."""

    def close(self) -> None:
        """Release the memory."""


class _NoFull:
    """The memory of an engine that keeps no logits."""

    def bind(self, binder: Any, num_logit_rows: int) -> None:
        """See FullMemory."""

    def read(self, rows: Ints) -> NDArray[np.float32]:
        """See FullMemory."""
        raise AssertionError("an engine that returns all logits keeps none")

    def close(self) -> None:
        """See FullMemory."""


NO_FULL = _NoFull()


class Head(Part):
    """The head of an engine: all logits of each row."""

    def __init__(self, entry: HeadEntry, full: FullMemory, others: list[HeadOutput]) -> None:
        """Take the memory of the logits that stay with the engine, and outputs of other parts."""
        self.full = full
        self._outputs = (*entry.outputs, *others)
        self._others = [output.name for output in others]
        self._vocab_size = entry.vocab_size
        self.num_forwards = 0  # that have begun; see ``LastLogits``
        self._num_bound = -1  # logit rows of the last call
        self._place: Ints | None = None  # of each logit row that repeats, its row in the call

    def bind(self, call: Call, binder: Binder) -> None:
        """See Part."""
        self.num_forwards += call.is_first
        rows = call.forward.logit_rows
        if len(rows) > call.num_new or self._place is not None:
            rows = self._distinct(call)
        binder.write({LOGIT_ROWS: rows})
        binder.returns(self._outputs, len(rows), 0)
        if binder.is_cleared or len(rows) != self._num_bound:
            self.full.bind(binder, len(rows))
            self._num_bound = len(rows)

    def collect(self, call: Call, found: dict[str, NDArray[Any]]) -> None:
        """Take the outputs of a call; with the last rows of its forward, return the logits."""
        if self._place is not None:  # rows repeat
            found = {n: a if n == GATHERED_LOGITS else a[self._place] for n, a in found.items()}
        if call.forward is not call.whole:
            self._put(call, found)
            found = call.outputs
        if call.is_last:
            call.returned["logits"] = self._logits(call, found)
            for name in self._others:
                call.returned[name] = found[name]

    def read(self, rows: Ints) -> NDArray[np.float32]:
        """Return a copy of all logits of some of the last call's logit rows, (n, V)."""
        return self.full.read(rows if self._place is None else self._place[rows])

    def close(self) -> None:
        """See Part."""
        self.num_forwards += 1
        self.full.close()

    def _logits(self, call: Call, found: dict[str, NDArray[Any]]) -> Logits:
        return DenseLogits(found[LOGITS], found.get(LOGSUMEXP))

    def _distinct(self, call: Call) -> Ints:
        """Return the rows whose logits a call returns: repeated rows once.

        A call returns at most S rows.
        """
        rows, self._place = call.forward.logit_rows, None
        if len(rows) > call.num_new:
            rows, self._place = np.unique(rows, return_inverse=True)
        return rows

    def _put(self, call: Call, found: dict[str, NDArray[Any]]) -> None:
        """Put the outputs of a call at their place among those of the whole forward."""
        whole = call.whole
        place = whole.logit_rows_in(call.start, call.start + call.forward.num_new)  # (R,)
        of_pairs = place[(whole.gather or _NO_PAIRS).rows]  # (N,)
        for name, array in found.items():
            where = of_pairs if name == GATHERED_LOGITS else place
            if name not in call.outputs:
                call.outputs[name] = np.empty((len(where), *array.shape[1:]), array.dtype)
            call.outputs[name][where] = array


class TopHead(Head):
    """A top-k head: the largest logits of each row; all of them may stay with the engine."""

    def _logits(self, call: Call, found: dict[str, NDArray[Any]]) -> Logits:
        tops = found[TOP_IDS], found[TOP_LOGITS], found[LOGSUMEXP]
        if self.full is NO_FULL:
            return TopLogits(*tops)
        return TopLogits(*tops, KeptLogits(self, call.whole.logit_rows, call.start))


class GatherHead(Head):
    """A gather head: the logits of pairs, or of whole rows where a forward names no pairs."""

    reads: ClassVar[Mapping[str, str]] = {
        "gather": "a gather is given, but the engine has no gather head; leave it out, or export "
        "the bundle with --logits gather"
    }

    def bind(self, call: Call, binder: Binder) -> None:
        """See Part."""
        if call.is_first and call.whole.gather is not None:
            check_gather(call.whole.gather, len(call.whole.logit_rows), self._vocab_size)
        rows = self._distinct(call)
        pairs = call.forward.gather or _NO_PAIRS
        of_pairs = pairs.rows if self._place is None else self._place[pairs.rows]
        binder.write({LOGIT_ROWS: rows, GATHER_ROWS: of_pairs, GATHER_IDS: pairs.token_ids})
        binder.returns(self._outputs, len(rows), len(pairs.rows))
        self.full.bind(binder, len(rows))

    def collect(self, call: Call, found: dict[str, NDArray[Any]]) -> None:
        """See Head."""
        if call.forward.gather is None:
            found[LOGITS] = self.full.read(np.arange(len(found[LOGSUMEXP])))
            del found[GATHERED_LOGITS]
        super().collect(call, found)

    def _logits(self, call: Call, found: dict[str, NDArray[Any]]) -> Logits:
        if LOGITS in found:
            return super()._logits(call, found)
        return GatheredLogits(found[GATHERED_LOGITS], found[LOGSUMEXP])


def check_gather(gather: Gather, num_logit_rows: int, vocab_size: int) -> None:
    """Raise InputError unless the pairs name logit rows and tokens."""
    rows, token_ids = gather
    check_array(GATHER_ROWS, rows, np.dtype(np.int64), 1)
    check_array(GATHER_IDS, token_ids, np.dtype(np.int64), 1)
    if rows.shape != token_ids.shape:
        raise InputError(
            f"{GATHER_IDS} has shape {token_ids.shape}, expected {rows.shape} as {GATHER_ROWS}"
        )
    check_range(GATHER_ROWS, rows, num_logit_rows)
    check_range(GATHER_IDS, token_ids, vocab_size)
