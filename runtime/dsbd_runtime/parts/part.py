"""Part: one kind of state of an engine, its entry in the manifest, and a call as the parts see it.

An engine is a list of parts. Its manifest entry has a ``PartEntry`` for each of them
(``ModelEntry.parts``). When the engine is opened, each entry becomes a ``Part``, which binds the
tensors of its kind that a call reads and writes. A kind that an engine lacks is not in the list.

Dimensions of tensors are numbers or names. Dimensions with the same name are equal within a call:

| name | of one engine call |
|---|---|
| S | forest nodes, parents before children |
| C | capacity of the caches in rows |
| R | rows whose logits are requested |
| F, T, P | features that a target returns; the target's and the draft's features that are read |
| A, M, B, L | with recent rows: ancestors, capacity, checkpoints, new rows of a checkpoint |
| Q, E, D | with sources: sources of the call, rows of the longest, rows of the call for a source |
| K | rows to move |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward
from dsbd_forward.rows import Ints
from dsbd_runtime.devices import Device
from dsbd_runtime.errors import InputError, ProviderError
from dsbd_runtime.parts.host_binder import HeadOutput, HostBinder

INT64, BOOL, FLOAT32 = "tensor(int64)", "tensor(bool)", "tensor(float)"
FLOAT_TYPES = {"fp32": FLOAT32, "fp16": "tensor(float16)", "bf16": "tensor(bfloat16)"}
"""The floats of an engine by the manifest's ``dtype``."""


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of one tensor of the contract; a name or None is a dynamic dimension."""

    type: str
    shape: tuple[int | str | None, ...]


Tensors = dict[str, TensorSpec]
"""Tensors by name."""


@dataclass(frozen=True, kw_only=True)
class GraphContract:
    """The inputs and outputs that a graph must have."""

    inputs: Tensors
    outputs: Tensors

    @classmethod
    def of(cls, parts: Iterable[PartEntry]) -> GraphContract:
        """Return the contract of an engine of these parts."""
        inputs: Tensors = {}
        outputs: Tensors = {}
        for part in parts:
            contract = part.contract()
            inputs |= contract.inputs
            outputs |= contract.outputs
        return cls(inputs=inputs, outputs=outputs)


class Call:
    """One engine call: some rows of a forward, or all of them.

    forward: the S = ``num_new`` rows; the cache's rows ``first_row`` to ``stop - 1``.
    whole: the whole forward; the call's rows begin at its row ``start``.
    returned: results of the whole forward, by field of ``ForwardResult``; parts fill it in.
    outputs: outputs of earlier calls of the whole forward, by their name in the graph.
    """

    def __init__(
        self, forward: Forward, first_row: int, of: Call | None = None, start: int = 0
    ) -> None:
        """Take the rows; ``of``: the whole forward's call, whose row ``start`` is the first."""
        self.num_new = num_new = len(forward.token_ids)
        self.forward = forward
        self.first_row = first_row
        self.stop = first_row + num_new
        self.start = start
        self.is_first = start == 0
        self.whole: Forward = forward if of is None else of.whole
        self.is_last = of is None or start + num_new == len(of.whole.token_ids)
        self.returned: dict[str, Any] = {} if of is None else of.returned
        self.outputs: dict[str, NDArray[Any]] = {} if of is None else of.outputs

    def part(self, start: int, stop: int) -> Call:
        """Return the call of the rows ``start`` to ``stop - 1``; the same object for all rows."""
        if stop - start == self.num_new:
            return self
        forward = self.forward.part(start, stop)
        return Call(forward, self.first_row + start, self, self.start + start)

    def count_run(self, seconds: float, *, sets_up: bool = False) -> None:
        """Add seconds that the engine's runtime took; ``sets_up``: see ForwardResult."""
        self.returned["run_s"] = self.returned.get("run_s", 0.0) + seconds
        if sets_up:
            self.returned["sets_up"] = True

    def chunks(self, most_rows: int) -> Iterator[Call]:
        num_new = self.num_new
        for start in range(0, num_new, most_rows):
            yield self.part(start, min(start + most_rows, num_new))


NewRows = Callable[[tuple[int, ...], Any], NDArray[Any]]
"""Makes an array of new rows of a shape and type: zeros, or noise."""


class HostGraphs(Protocol):
    """Opens the graphs of an engine as ONNX Runtime runs them on the host."""

    ort: Any

    def open(self, path: Path) -> Any:
        """Return the session on a graph; raise BundleError if it cannot be loaded."""

    def open_again(self, path: Path) -> Any:
        """Return the session on a graph whose weights the engine has mapped already."""

    def releasing_options(self) -> Any:
        """Return the options of a call that frees its memory at the end."""


class PartEntry:
    """Description of one kind of state in the manifest; a kind overrides the members that differ.

    lacks: for a kind that devices refuse, the error's words for it, such as "reads no sources".
    """

    lacks: ClassVar[str] = ""

    @property
    def files(self) -> tuple[str, ...]:
        """Names of its own graphs, next to the engine's."""
        return ()

    @property
    def spec(self) -> Mapping[str, Any]:
        return {}

    def contract(self) -> GraphContract:
        """Return the inputs and outputs of the engine's graph that belong to it, by name."""
        return GraphContract(inputs={}, outputs={})

    def on_host(self, place: HostPlace) -> Part:
        """Return the part of an open engine with its memory on the host."""
        raise NotImplementedError

    def on_device(self, place: DevicePlace) -> Part:
        """Return the part with its memory on a device; ProviderError: devices refuse this kind."""
        raise ProviderError(f"{place.device.name} {self.lacks}; run it on the CPU")


class Part:
    """One kind of state of an open engine; a kind overrides the methods that it needs.

    reads: the optional fields of ``Forward`` that the part reads. The value is the error message
        for an engine that does not read the field.
    sentences: ``reads`` of all kinds.
    splits: whether it makes several calls of one, see ``calls``.
    grows_in_calls: whether ``num_bytes`` changes in calls too, not only in ``reserve``.
    num_bytes: bytes of the rows that it keeps.
    missing: error message if the part is requested from an engine without it.
    returns: its outputs with a row for each logit row, which the head collects; each has the name
        of a field of ``ForwardResult``.
    """

    reads: ClassVar[Mapping[str, str]] = {}
    sentences: ClassVar[dict[str, str]] = {}
    splits: ClassVar[bool] = False
    grows_in_calls: ClassVar[bool] = False
    missing: ClassVar[str] = ""
    returns: ClassVar[tuple[HeadOutput, ...]] = ()

    def __init_subclass__(cls) -> None:
        Part.sentences.update(cls.reads)

    @property
    def num_bytes(self) -> int:
        return 0

    def calls(self, call: Call) -> Iterator[Call]:
        """Yield the calls that make up ``call``; the caller runs each before the next one.

        Code after a ``yield`` runs when that call has been made, and not if it failed.
        """
        yield call

    def bind(self, call: Call, binder: Any) -> None:
        """Bind the tensors of this kind that a call reads and writes.

        InputError: the engine does not take the forward; nothing has been computed.
        CapacityError: no memory.
        """

    def reserve(self, num_rows: int, num_used: int) -> None:
        """Make room for ``num_rows`` rows of the cache, keep the first ``num_used``.

        With ``num_used`` 0 a new path begins. With ``num_rows`` 0 too, all memory is freed.
        """

    def keep(self, rows: Ints) -> None:
        """Keep the cache rows ``rows``, (K,) int64 strictly increasing; drop all others."""

    def close(self) -> None:
        """Release memory and graphs; calling it again does nothing."""


PartT = TypeVar("PartT", bound=Part)


def part_of(parts: Iterable[Part], kind: type[PartT]) -> PartT:
    """Return the part of a kind; raise InputError with ``missing`` for an engine without it."""
    for part in parts:
        if isinstance(part, kind):
            return part
    raise InputError(kind.missing)


@dataclass(frozen=True)
class HostPlace:
    """Where the parts of an engine in host memory are opened.

    binder, folder: the engine's. graphs: opens graphs of the folder. opened: the parts so far.
    of_target: for a draft, opens or finds the target's part of an entry's kind, to share it.
    """

    binder: HostBinder
    folder: Path
    graphs: HostGraphs
    of_target: Callable[[type[PartEntry]], Part]
    new_rows: NewRows = np.zeros
    opened: list[Part] = field(default_factory=list)


@dataclass(frozen=True)
class DevicePlace:
    """Where the parts of an engine on a device are opened; ``rows``: its caches."""

    device: Device
    rows: Any
