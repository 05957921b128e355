"""An engine as the algorithm sees it: append rows to a cache, get logits, keep some rows."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward, ForwardResult, Source
from dsbd_forward.spec import EngineSpec


class Engine(Protocol):
    """A language model with a cache, which has one row for each computed node."""

    @property
    def spec(self) -> EngineSpec:
        """Its specification, which never changes."""

    @property
    def num_rows(self) -> int:
        """Rows now in the cache."""

    def forward(self, forward: Forward) -> ForwardResult:
        """Append the rows of a forward; return the logits of some of them, and features."""

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Keep these cache rows, (K,) int64 increasing, in this order; drop all others."""


class GrowingEngine(Engine, Protocol):
    """An engine that should be told the expected length, so that its cache is allocated once."""

    def expect(self, num_rows: int) -> None:
        """Allocate room for ``num_rows`` rows now, if there is memory; later numbers may differ."""


class SteppedEngine(Engine, Protocol):
    """An engine whose cache grows in steps."""

    @property
    def num_free_rows(self) -> int:
        """Rows that can be appended before the cache grows, which copies it."""


class SourceReader(Engine, Protocol):
    """An engine whose forwards may have rows of several sources."""

    def read_source(self, source: Source) -> None:
        """Read a source before a forward with other sources too, so that its errors end only it."""

    def release_source(self, source: Source) -> None:
        """Free the stored data of a source; a later forward may use the source again."""
