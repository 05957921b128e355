"""Session with caches in device memory: one copy in, one call, one copy out per forward."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.device.bound_calls import BoundCaches, LoadedModel
from dsbd_runtime.devices import RecordedWork
from dsbd_runtime.errors import CapacityError, EngineError
from dsbd_runtime.parts.attention.attention_rows import Rows
from dsbd_runtime.parts.device_binder import StagedCall, padded_rows, row_bucket
from dsbd_runtime.parts.head.head import Head
from dsbd_runtime.parts.part import Call, DevicePlace, part_of


class DeviceSession:
    """One engine on a device together with its parts.

    A call's sizes are rounded up, and every size is bound once. After the first call of a size
    nothing is allocated. Calls of a size that occurs again are recorded and replayed.
    """

    def __init__(self, model: LoadedModel) -> None:
        """Own the device and both engines; CapacityError: no room for the caches; closes all."""
        self._model = model
        self._inputs = model.entry.contract.inputs
        self.caches = DeviceRows(model)
        place = DevicePlace(model.device, self.caches)
        self.parts = tuple(part.on_device(place) for part in model.entry.parts)
        self.rows = part_of(self.parts, Rows)
        self._head = part_of(self.parts, Head)

    @property
    def grows_at_a_cost(self) -> bool:
        return self._model.most_recorded > 0

    def run(self, call: Call) -> None:
        """See Session; CapacityError: the device has no room for the outputs."""
        bound, model = self.caches.bound, self._model
        staged = StagedCall(
            self._inputs, call, capacity=bound.capacity, most_rows=model.max_forward_rows
        )
        try:
            for part in self.parts:
                part.bind(call, staged)
            forward = bound.forward(staged)
        except MemoryError as error:
            num_rows = staged.sizes.get("R", staged.num_logit_rows)
            raise CapacityError(
                f"{model.device.name} has no memory for the outputs of {num_rows} rows; ask for "
                "fewer beams or a shorter draft, or export with --logits topk:K"
            ) from error
        outputs = forward.run(staged)
        call.count_run(staged.run_s, sets_up=staged.sets_up)
        self._head.collect(call, outputs)

    def close(self) -> None:
        self.caches.close()  # first, because its calls are bound to the memory of all parts
        for part in self.parts:
            part.close()
        self._model.prune_engine.close()
        self._model.engine.close()
        self._model.device.close()


class DeviceRows:
    """Key/value caches on a device, with the calls bound to them: a ``RowMemory``.

    The caches are never copied to the host. To grow, they are copied on the device to new memory,
    before the old memory is freed. A move is one copy to the device and one run of the prune graph.
    """

    def __init__(self, model: LoadedModel) -> None:
        """Allocate the smallest caches; without room for them, close the whole model."""
        self.recorded: list[RecordedWork] = []
        self._model = model
        self._bound: BoundCaches | None = None
        self.capacity = self.num_bytes = 0
        try:
            self._hold(self._allocate(self._capacity_for(0)))
        except BaseException:
            model.prune_engine.close()
            model.engine.close()
            model.device.close()
            raise

    @property
    def bound(self) -> BoundCaches:
        """The caches and their calls; raise EngineError after ``close``."""
        if self._bound is None:
            raise EngineError(f"the engine on {self._model.device.name} is closed; load it again")
        return self._bound

    def bind(self, binder: Any) -> None:
        """See RowMemory: the caches are bound with each size of call."""

    def reserve(self, num_rows: int, num_used: int) -> None:
        """Give the caches room for ``num_rows`` rows and the padding of their forwards.

        With ``num_used`` 0 the caches also shrink. If calls are recorded they do not, because the
        addresses must not change; all rows are then only set to zero.
        """
        bound = self.bound
        capacity = self._padded_capacity(num_rows, num_used)
        if capacity > bound.capacity or (num_used == 0 and capacity < bound.capacity):
            self._resize(capacity, num_used)
        elif num_used == 0:
            bound.caches.fill_zero()

    def shrink(self, num_used: int) -> None:
        capacity = self._capacity_for(num_used)
        if capacity < self.bound.capacity:
            self._resize(capacity, num_used)

    def move_rows(self, src_rows: NDArray[np.int64], first_row: int) -> None:
        bound = self.bound
        if num_moved := src_rows.shape[0]:
            padded = row_bucket(num_moved, bound.capacity)
            has_room = first_row + padded <= bound.capacity
            bound.move(padded if has_room else num_moved).run(src_rows, first_row)

    def close(self) -> None:
        if self._bound is not None:
            self._bound.free()
            self._bound = None
            self.capacity = self.num_bytes = 0

    def _padded_capacity(self, num_rows: int, num_used: int) -> int:
        num_padded = num_used + padded_rows(num_rows - num_used, self._model.max_forward_rows)
        try:
            return self._capacity_for(num_padded)
        except CapacityError:  # the last rows of a full cache have no padding
            return self._capacity_for(num_rows)

    def _capacity_for(self, num_rows: int) -> int:
        """Return the engine's capacity for some rows; with recorded calls it never shrinks."""
        capacity = self._model.engine.capacity_for(num_rows)
        return max(capacity, self.capacity) if self._model.most_recorded else capacity

    def _allocate(self, capacity: int) -> BoundCaches:
        try:
            return BoundCaches(self._model, capacity, self.recorded)
        except MemoryError as error:
            raise CapacityError(
                f"{self._model.device.name} has no memory for a key/value cache of {capacity} rows "
                f"(it has {self.capacity} rows now, {self.num_bytes} bytes, which stay until the "
                "new ones are there); shorten the prompt, ask for fewer new tokens or fewer beams"
            ) from error

    def _resize(self, capacity: int, num_used: int) -> None:
        old, new = self.bound, self._allocate(capacity)
        try:
            if num_used:
                new.take_rows(old, num_used)
            self._model.device.synchronize()
        except BaseException:
            new.free()
            raise
        old.free()
        self._hold(new)

    def _hold(self, bound: BoundCaches) -> None:
        self._bound, self.capacity, self.num_bytes = bound, bound.capacity, bound.caches.num_bytes
