"""Features: hidden states of an engine's rows, which a feature draft's engine reads.

A target's engine returns the features of the rows that a call names. A feature draft's engine
returns the features of all rows of a call, and reads the features of the rows' parents. Features
stay where the engine runs: in arrays on the host, in device memory on a device.

The tensors are in the engine's float type. W is the width of the target's features, Wd the width
of the draft's own:

| tensor | shape | meaning |
|---|---|---|
| feature_rows | [F] int64 | target: which of the S nodes have their features returned |
| features | [F,W] | target: its hidden states of these nodes |
| target_features | [T,W] | draft: features that the target has returned |
| own_features | [P,Wd] | draft: features that it has returned itself |
| feature_index | [S] int64 | draft: the feature of each node's parent, as an index in |
| | | target_features and own_features joined; -1: none, zeros |
| features | [S,Wd] | draft: its own features of all nodes |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dsbd_forward.features import ParentFeatures
from dsbd_forward.forward import Forward
from dsbd_forward.rows import NO_INTS, Ints
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.feature.feature_memory import (
    FEATURE_INDEX,
    FEATURE_ROWS,
    FEATURES,
    OWN_FEATURES,
    TARGET_FEATURES,
    DeviceFeatureMemory,
    HostFeatureMemory,
    ReadFeatures,
)
from dsbd_runtime.parts.part import (
    FLOAT_TYPES,
    INT64,
    Call,
    DevicePlace,
    GraphContract,
    HostPlace,
    Part,
    PartEntry,
    TensorSpec,
)


@dataclass(frozen=True, kw_only=True)
class FeatureEntry:
    """The features that an engine returns, and those that a feature draft reads.

    width: width of the target's features.
    own_width: width of a feature draft's own features; None for a target.
    layers: for a target, the transformer layers whose inputs are its features, in the order in
        which they are concatenated; the number of layers means the LM head. None for a draft.
    """

    width: int
    layers: list[int] | None = None
    own_width: int | None = None


class _Features(Part):
    """Features of an engine's rows; ``memory`` holds them."""

    def __init__(self, memory: HostFeatureMemory | DeviceFeatureMemory) -> None:
        self._memory = memory

    def close(self) -> None:
        self._memory.close()


class FeaturesOfTarget(_Features):
    """The features that a target's engine returns for the rows that a forward names."""

    reads: ClassVar[Mapping[str, str]] = {
        FEATURE_ROWS: "feature_rows are given, but the engine returns no features; export the "
        "bundle with dsbd-export --features"
    }

    def bind(self, call: Call, binder: Any) -> None:
        whole = _named_rows(call.whole.feature_rows)
        if call.is_first:
            check_kept_rows(whole, call.whole.num_new)
            call.returned[FEATURES] = self._memory.take(len(whole))
        rows = _named_rows(call.forward.feature_rows)
        binder.write({FEATURE_ROWS: rows})
        first = int(np.searchsorted(whole, call.start)) if call.start else 0
        self._memory.bind_returned(binder, call.returned[FEATURES], first, len(rows), "F")


class FeaturesOfDraft(_Features):
    """A feature draft's features: it reads those of its rows' parents, and returns all rows'."""

    reads: ClassVar[Mapping[str, str]] = {
        "parent_features": "parent_features are given, but the engine is no feature draft's; leave "
        "them out",
        **FeaturesOfTarget.reads,
    }

    def bind(self, call: Call, binder: Any) -> None:
        if call.is_first:
            _check_draft(call.whole, self._memory.kind)
            call.returned[FEATURES] = self._memory.take(call.whole.num_new)
        assert call.forward.parent_features is not None  # checked with the whole forward
        self._memory.bind_read(binder, ReadFeatures.of(call.forward.parent_features))
        kept, number = call.returned[FEATURES], call.forward.num_new
        self._memory.bind_returned(binder, kept, call.start, number, "S")


class _FeaturesEntry(PartEntry):
    """Manifest entry of features; their memory is where the engine runs."""

    dtype: str
    role: ClassVar[str]
    part: ClassVar[type[_Features]]

    @property
    def widths(self) -> dict[str, int]:
        raise NotImplementedError

    def on_host(self, place: HostPlace) -> Part:
        return self.part(HostFeatureMemory(self.role, self.widths, self.dtype))

    def on_device(self, place: DevicePlace) -> Part:
        return self.part(DeviceFeatureMemory(place.device, self.role, self.widths, self.dtype))


@dataclass(frozen=True, kw_only=True)
class ReturnedFeaturesEntry(_FeaturesEntry):
    """Features that a target returns."""

    width: int
    dtype: str
    role = "target"
    part = FeaturesOfTarget
    spec: ClassVar[Mapping[str, Any]] = {"returns_features": True}

    @property
    def widths(self) -> dict[str, int]:
        return {FEATURES: self.width}

    def contract(self) -> GraphContract:
        inputs = {FEATURE_ROWS: TensorSpec(INT64, ("F",))}
        features = TensorSpec(FLOAT_TYPES[self.dtype], ("F", self.width))
        return GraphContract(inputs=inputs, outputs={FEATURES: features})


@dataclass(frozen=True, kw_only=True)
class DraftFeaturesEntry(_FeaturesEntry):
    """Features that a feature draft reads (the target's have ``width``) and returns."""

    width: int
    own_width: int
    dtype: str
    role = "draft"
    part = FeaturesOfDraft
    spec: ClassVar[Mapping[str, Any]] = {"reads_features": True}

    @property
    def widths(self) -> dict[str, int]:
        return {FEATURES: self.own_width, TARGET_FEATURES: self.width, OWN_FEATURES: self.own_width}

    def contract(self) -> GraphContract:
        kind = FLOAT_TYPES[self.dtype]
        inputs = {
            TARGET_FEATURES: TensorSpec(kind, ("T", self.width)),
            OWN_FEATURES: TensorSpec(kind, ("P", self.own_width)),
            FEATURE_INDEX: TensorSpec(INT64, ("S",)),
        }
        features = TensorSpec(kind, ("S", self.own_width))
        return GraphContract(inputs=inputs, outputs={FEATURES: features})


def features_part(entry: FeatureEntry, dtype: str) -> ReturnedFeaturesEntry | DraftFeaturesEntry:
    """Return the features' part of an engine with this float type."""
    if entry.own_width is None:
        return ReturnedFeaturesEntry(width=entry.width, dtype=dtype)
    return DraftFeaturesEntry(width=entry.width, own_width=entry.own_width, dtype=dtype)


def _named_rows(rows: Ints | None) -> Ints:
    return NO_INTS if rows is None else rows


def check_kept_rows(rows: Any, num_new: int) -> None:
    """Raise InputError unless these are increasing rows of a forward."""
    if not isinstance(rows, np.ndarray) or rows.dtype != np.int64 or rows.ndim != 1:
        raise InputError(
            f"feature_rows is {rows!r:.60}, expected a numpy array of 1 dimension, int64"
        )
    is_wrong = (rows < 0) | (rows >= num_new)
    is_wrong[1:] |= rows[1:] <= rows[:-1]
    if is_wrong.any():
        index = int(is_wrong.argmax())
        raise InputError(
            f"feature_rows[{index}] is {rows[index]}, expected increasing rows from 0 to "
            f"{num_new - 1}"
        )


def _check_draft(forward: Forward, kind: type) -> None:
    """Raise InputError unless a forward has the features that a draft reads, and requests none."""
    if forward.parent_features is None:
        raise InputError(
            "the engine is a feature draft's, and each of its rows needs the feature of "
            "its parent; give the forward parent_features"
        )
    if forward.feature_rows is not None:
        raise InputError(
            "feature_rows are given, but a feature draft's engine returns the features of "
            "all rows; leave them out"
        )
    check_parents(forward.parent_features, forward.num_new, kind)


def check_parents(parents: ParentFeatures, num_new: int, kind: type) -> None:
    """Raise InputError unless these are features, of a session's kind, for every row."""
    for name, array in (("sources", parents.sources), ("rows", parents.rows)):
        if array.shape != (num_new,) or array.dtype != np.int64:
            raise InputError(
                f"parents.{name} has shape {array.shape} and type {array.dtype}, expected "
                f"({num_new},) and int64"
            )
    for features in parents.forwards:
        if not isinstance(features, kind):
            raise InputError(
                f"the features of a parent are {type(features).__name__}, this engine reads "
                f"{kind.__name__}; run target and draft on one provider and device"
            )
    sizes = np.array([*(len(features) for features in parents.forwards), 1])  # the last: zeros
    is_wrong = (parents.sources < -1) | (parents.sources >= len(parents.forwards))
    sources = np.where(is_wrong, -1, parents.sources)
    is_there = (parents.rows >= 0) & (parents.rows < sizes[sources])
    is_wrong |= (sources >= 0) & ~is_there
    if is_wrong.any():
        index = int(is_wrong.argmax())
        raise InputError(
            f"the parent of row {index} has its feature in row {parents.rows[index]} of forward "
            f"{parents.sources[index]}, expected one of {len(parents.forwards)} forwards with "
            f"{sizes[:-1].tolist()} rows"
        )
