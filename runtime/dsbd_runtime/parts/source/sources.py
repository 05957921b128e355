"""Sources: encoder outputs of texts or sounds, which the rows of a decoder read.

The tensors are described in ``encoder_entry``. The encoder runs once for each source. A call of the
decoder names the source that each of its rows reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dsbd_runtime.parts.attention.attention_rows import places_of_rows
from dsbd_runtime.parts.host_binder import HostBinder
from dsbd_runtime.parts.part import (
    INT64,
    Call,
    GraphContract,
    HostPlace,
    Part,
    PartEntry,
    TensorSpec,
)
from dsbd_runtime.parts.source.cross_slots import CrossSlots
from dsbd_runtime.parts.source.encoder_entry import (
    ENCODER_FILE,
    SOURCE_LENGTHS,
    SOURCE_PLACES,
    SOURCE_ROWS,
    EncoderEntry,
    cross_specs,
)
from dsbd_runtime.parts.source.ort_encoder import OrtEncoder


@dataclass(frozen=True, kw_only=True)
class SourcesEntry(PartEntry):
    """The sources in the manifest: the engine reads the cross rows of ``encoder``."""

    encoder: EncoderEntry

    lacks: ClassVar[str] = "reads no sources"  # ``check_runnable`` refuses it before

    @property
    def files(self) -> tuple[str, ...]:
        return (ENCODER_FILE,)

    @property
    def spec(self) -> Mapping[str, Any]:
        return {"reads_source": True, "joins_sources": True}

    def contract(self) -> GraphContract:
        inputs = {
            SOURCE_ROWS: TensorSpec(INT64, ("Q", "D")),
            SOURCE_PLACES: TensorSpec(INT64, ("S",)),
            SOURCE_LENGTHS: TensorSpec(INT64, ("Q",)),
        }
        return GraphContract(inputs=inputs | cross_specs(self.encoder, "Q", "E"), outputs={})

    def on_host(self, place: HostPlace) -> Sources:
        """See PartEntry; if a draft shares the target's encoder, that encoder reads the sources."""
        shared = None
        if self.encoder.is_shared:
            target = place.of_target(type(self))
            assert isinstance(target, Sources)  # checked when the bundle was opened
            shared = target.encoder
        path = place.folder / ENCODER_FILE
        graphs = place.graphs
        encoder = OrtEncoder(graphs.ort, path, self.encoder, graphs.open, shared=shared)
        return Sources(encoder, CrossSlots(graphs.ort, encoder, self.encoder))


class Sources(Part):
    """The sources that an engine's calls read; ``slots`` keeps the rows of ``encoder``."""

    splits = True
    grows_in_calls = True

    def __init__(self, encoder: OrtEncoder, slots: CrossSlots) -> None:
        self.encoder = encoder
        self.slots = slots

    @property
    def num_bytes(self) -> int:
        return self.slots.num_bytes

    def calls(self, call: Call) -> Iterator[Call]:
        """Yield calls with only as many sources as fit the memory together."""
        sources = call.forward.sources
        if sources is None:
            yield call
            return
        max_sources = self.slots.most_together(sources.distinct)
        start, together = 0, set[int]()
        for row, source in enumerate(sources.index.tolist()):
            if source not in together and len(together) == max_sources:
                yield call.part(start, row)
                start = row
                together.clear()
            together.add(source)
        yield call.part(start, call.forward.num_new)

    def bind(self, call: Call, binder: HostBinder) -> None:
        """See Part; the encoder reads sources that are not kept. Raises as ``of_call``."""
        of_rows = call.forward.row_sources
        slots = self.slots.of_call(of_rows.distinct)
        binder.read_values(slots.values)
        rows, places = places_of_rows(slots.items[of_rows.index], len(slots.lengths))
        arrays = {SOURCE_ROWS: rows, SOURCE_PLACES: places, SOURCE_LENGTHS: slots.lengths}
        binder.write(arrays)
        if (reading := self.encoder.take_reading()) is not None:
            call.returned["reading"] = reading

    def reserve(self, num_rows: int, num_used: int) -> None:
        if num_rows == 0:
            self.slots.forget()

    def close(self) -> None:
        self.slots.forget()
        self.encoder.close()
