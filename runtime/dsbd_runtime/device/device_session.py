"""Session with caches in device memory: one copy in, one call, one copy out per forward."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward, SourceReading
from dsbd_runtime.device.bound_calls import BoundCaches, LoadedModel
from dsbd_runtime.device.device import DeviceArray
from dsbd_runtime.device.recorded_calls import Recorder
from dsbd_runtime.engine.graph import GATHERED_LOGITS
from dsbd_runtime.engine.session import EngineInputs, EngineOutputs
from dsbd_runtime.errors import CapacityError, EngineError, InputError
from dsbd_runtime.parts.device_features import (
    DeviceFeatures,
    FeatureArrays,
    FeatureSizes,
    FeatureStore,
)
from dsbd_runtime.parts.full_logits import DeviceLogits

_FORWARD_ROWS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256)
_MOST_PAIRS = 2**40  # beyond any memory: the number of pairs has no bound of its own


class DeviceSession:
    """One engine and its prune graph on a device, with the caches in the device's memory.

    S is rounded up to one of ``forward_bucket``, R, N and K to powers of two, and every size is
    bound once: after the first call of a size nothing is allocated, and a size that returns is
    recorded and replayed. A forward is one copy to the device (ids, positions, masks), one call,
    and one copy back (the logit rows), which the host waits for; a move is one copy to the device
    and one call. The caches never cross to the host: they grow by copies on the device, into new
    memory beside the old. Full logits beside a top-k head stay on the device but for the rows that
    are read.
    """

    def __init__(self, model: LoadedModel) -> None:
        """Take over the device and both engines, which ``close`` closes.

        Raises CapacityError, with everything closed, when the device has no room for the caches.
        """
        self._model = model
        self._recorder = Recorder(model.device, model.most_recorded)
        self._bound: BoundCaches | None = None
        kept = model.entry.kept_output is not None
        self._full = DeviceLogits(model.device, model.entry.vocab_size) if kept else None
        self._features = self._store = None
        if model.entry.features is not None:
            self._features = FeatureArrays(model.device, model.entry)
            self._store = FeatureStore(model.device, model.entry)
        self._last_full: DeviceArray | None = None
        self._last_index: NDArray[np.int64] | None = None  # its row of each logit row that repeats
        try:
            self._bound = self._allocate(self._capacity_for(0))
        except BaseException:
            self.close()
            raise

    @property
    def capacity(self) -> int:
        """Rows that the caches hold now; 0 after ``close``."""
        return 0 if self._bound is None else self._bound.capacity

    @property
    def grows_at_a_cost(self) -> bool:
        """See Session."""
        return self._model.most_recorded > 0

    @property
    def num_recorded(self) -> int:
        """Sizes of calls that are recorded now, each replayed as one unit."""
        return self._recorder.num_recorded

    @property
    def kv_bytes(self) -> int:
        """Bytes that the caches take now."""
        return 0 if self._bound is None else self._bound.caches.num_bytes

    @property
    def recent(self) -> None:
        """None: providers with caches on a device refuse engines with recent rows."""

    @property
    def sources(self) -> None:
        """None: providers with caches on a device refuse engines that read sources."""

    @property
    def aligner(self) -> None:
        """None, as ``sources``."""

    @property
    def feature_kind(self) -> type:
        """See Session."""
        return DeviceFeatures

    def new_features(self, num_rows: int) -> DeviceFeatures:
        """See Session."""
        self._open()
        assert self._store is not None  # the caller has asked the manifest
        return self._store.take(num_rows)

    def reserve(self, num_rows: int, num_used: int) -> None:
        """Give the caches room for ``num_rows`` rows and the padding of their forwards.

        Where calls are recorded, a larger capacity is kept also with ``num_used`` 0, which then
        only sets all rows to zero: the addresses must last.
        """
        bound = self._open()
        capacity = self._padded_capacity(num_rows, num_used)
        if capacity > bound.capacity or (num_used == 0 and capacity < bound.capacity):
            self._resize(capacity, num_used)
        elif num_used == 0:
            bound.caches.fill_zero()

    def shrink(self, num_used: int) -> None:
        """Give the caches the smallest capacity for their first ``num_used`` rows, which stay."""
        bound = self._open()
        capacity = self._capacity_for(num_used)
        if capacity < bound.capacity:
            self._resize(capacity, num_used)

    def run(self, inputs: EngineInputs) -> EngineOutputs:
        """Append S rows at ``first_row``; return the outputs of the head for the R logit rows.

        Raises CapacityError when the device has no room for the outputs; the caches are as before.
        """
        forward = inputs.forward
        if len(forward.logit_rows) <= forward.num_new:
            return self._run(inputs)
        distinct, index = np.unique(forward.logit_rows, return_inverse=True)  # some rows repeat
        gather = forward.gather
        if gather is not None:
            gather = gather._replace(rows=index[gather.rows])
        forward = dataclasses.replace(forward, logit_rows=distinct, gather=gather)
        outputs = self._run(dataclasses.replace(inputs, forward=forward))
        self._last_index = index
        return {
            name: array if name == GATHERED_LOGITS else array[index]
            for name, array in outputs.items()
        }

    def take_reading(self) -> SourceReading | None:
        """See Session: no engine here reads sources."""
        return None

    def read_full_logits(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return a copy of all logits of some of the last run's logit rows, (n, V).

        Raises CapacityError when there is no pinned memory for them.
        """
        self._open()
        assert self._full is not None and self._last_full is not None  # the caller knows of both
        try:
            index = rows if self._last_index is None else self._last_index[rows]
            return self._full.read(self._last_full, index)
        except MemoryError as error:
            raise CapacityError(
                f"{self._model.device.name} has no memory to copy full logits ({error}); close "
                "other programs that use the memory"
            ) from error

    def move_rows(self, src_rows: NDArray[np.int64], first_row: int) -> None:
        """Copy the rows ``src_rows`` (K,) to ``first_row .. first_row + K - 1``, as if at once."""
        bound = self._open()
        if num_moved := src_rows.shape[0]:
            padded = row_bucket(num_moved, bound.capacity)
            has_room = first_row + padded <= bound.capacity
            bound.move(padded if has_room else num_moved).run(src_rows, first_row)

    def close(self) -> None:
        """Release the caches, the engines and the device; calling it again does nothing."""
        if self._bound is not None:
            self._bound.free()
            self._bound = None
        if self._full is not None:
            self._full.free()
        if self._features is not None and self._store is not None:
            self._features.free()
            self._store.free()
        self._model.prune_engine.close()
        self._model.engine.close()
        self._model.device.close()

    def _run(self, inputs: EngineInputs) -> EngineOutputs:
        bound = self._open()
        num_rows = self._num_rows_bound(inputs)
        num_logit_rows = row_bucket(len(inputs.forward.logit_rows), num_rows)
        num_pairs = 0
        if inputs.forward.gather is not None:
            num_pairs = row_bucket(inputs.forward.num_pairs, _MOST_PAIRS)
        try:
            sizes = self._feature_sizes(inputs.forward, num_rows)
            forward = bound.forward((num_rows, num_logit_rows, num_pairs, sizes))
        except MemoryError as error:
            raise CapacityError(
                f"{self._model.device.name} has no memory for the outputs of {num_logit_rows} "
                "rows; ask for fewer beams or a shorter draft, or export with --logits topk:K"
            ) from error
        self._last_full, self._last_index = forward.full, None
        return forward.run(inputs)

    def _feature_sizes(self, forward: Forward, num_rows: int) -> FeatureSizes | None:
        """Return the rows of features that a call of S rows is bound for."""
        if forward.feature_rows is None:
            return None
        limit, parents = self._model.max_forward_rows, forward.parent_features
        if parents is None:
            return FeatureSizes(row_bucket(len(forward.feature_rows), limit))
        roles = [source.role for source in parents.forwards]
        is_own = np.array([*(role == "draft" for role in roles), False])  # the last: zeros
        num_own = int(np.count_nonzero(is_own[parents.sources]))
        num_target = int(np.count_nonzero(parents.sources >= 0)) - num_own
        return FeatureSizes(num_rows, row_bucket(num_target, limit), row_bucket(num_own, limit))

    def _open(self) -> BoundCaches:
        if self._bound is None:
            raise EngineError(f"the engine on {self._model.device.name} is closed; load it again")
        return self._bound

    def _padded_capacity(self, num_rows: int, num_used: int) -> int:
        num_padded = num_used + padded_rows(num_rows - num_used, self._model.max_forward_rows)
        try:
            return self._capacity_for(num_padded)
        except CapacityError:  # the last rows of a full cache are not padded
            return self._capacity_for(num_rows)

    def _capacity_for(self, num_rows: int) -> int:
        """Return the engine's capacity for so many rows; where calls are recorded, no less."""
        capacity = self._model.engine.capacity_for(num_rows, self.capacity)
        return max(capacity, self.capacity) if self._model.most_recorded else capacity

    def _num_rows_bound(self, inputs: EngineInputs) -> int:
        """Return S with padding, or without where the caches have no room for it."""
        num_new, limit = inputs.forward.num_new, self._model.max_forward_rows
        if num_new > limit:
            raise InputError(f"a forward of {num_new} rows, the session takes {limit}; split it")
        padded = forward_bucket(num_new, limit)
        return padded if inputs.first_row + padded <= self.capacity else num_new

    def _allocate(self, capacity: int) -> BoundCaches:
        try:
            return BoundCaches(self._model, capacity, self._full, self._features, self._recorder)
        except MemoryError as error:
            raise CapacityError(
                f"{self._model.device.name} has no memory for a key/value cache of {capacity} rows "
                f"(it has {self.capacity} rows now, {self.kv_bytes} bytes, which stay until the "
                "new ones are there); shorten the prompt, ask for fewer new tokens or fewer beams"
            ) from error

    def _resize(self, capacity: int, num_used: int) -> None:
        old, new = self._open(), self._allocate(capacity)
        try:
            if num_used:
                new.caches.copy_from(old.caches, num_used)
            self._model.device.synchronize()
        except BaseException:
            new.free()
            raise
        old.free()
        self._bound = new


def row_bucket(num_rows: int, limit: int) -> int:
    """Return the smallest power of two that holds ``num_rows``, at least 1, at most ``limit``.

    With a limit of 256: 0 and 1 give 1, 3 gives 4, 33 gives 64, 200 gives 256.
    """
    return min(1 << max(num_rows - 1, 0).bit_length(), limit)


def forward_bucket(num_rows: int, limit: int) -> int:
    """Return the rows of the call that a forward of ``num_rows`` rows is padded to.

    Finer than ``row_bucket`` where most verifications lie, since each padding row costs attention
    and products: with a limit of 256, 9 gives 16, 33 gives 40, 49 gives 64, 100 gives 128. In
    steps of 8, as tensor cores multiply.
    """
    fitting = (rows for rows in _FORWARD_ROWS if rows >= num_rows)
    return min(next(fitting, row_bucket(num_rows, limit)), limit)


def padded_rows(num_new: int, limit: int) -> int:
    """Return the rows that ``num_new`` rows take when they go in calls of at most ``limit`` rows.

    Only the last call is padded: with a limit of 256, 300 rows take 256 + 48.
    """
    rest = num_new % limit
    return num_new - rest + (forward_bucket(rest, limit) if rest else 0)
