"""What the HTTP layer needs of a Service: the seam for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dsbd_ort.engine import LiveRequest, ServiceEvent, ServiceLimits, ServiceStats
from dsbd_ort.pipeline import Pipeline


class EngineService(Protocol):
    """Answers requests one forest at a time; see dsbd_ort.engine.Service."""

    @property
    def pipeline(self) -> Pipeline:
        """The opened bundle."""

    @property
    def limits(self) -> ServiceLimits:
        """How many requests it takes."""

    def submit(
        self,
        prompt: str | Sequence[int],
        options: Mapping[str, Any],
        on_event: Callable[[ServiceEvent], None],
    ) -> LiveRequest:
        """Begin a request; its events come in another thread."""

    def stats(self) -> ServiceStats:
        """Return what is going on now."""

    def close(self, *, drain: bool = True) -> None:
        """Refuse new requests; finish the others, or cancel them."""
