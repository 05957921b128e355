"""A request that a service has accepted, and the events that it gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dsbd_errors import DsbdError
from dsbd_ort.decoding import DecodingRequest
from dsbd_ort.results import GenerationResult, StreamPiece, TextStream


@dataclass(frozen=True)
class Cancelled:
    """The request was cancelled, by its caller or because the service was closed."""


Ending = GenerationResult | DsbdError | Cancelled
"""The last event of a request."""

ServiceEvent = StreamPiece | Ending


@dataclass(eq=False, kw_only=True)
class LiveRequest:
    """A request that waits, runs or has ended.

    Attributes:
        request: of the decoding.
        texts: the text of its steps.
        num_rows: cache rows that it may need at most.
        on_event: is called with each of its events.
        wake: makes the engine loop look for cancelled requests.
        is_cancelled: whether its caller has cancelled it.
    """

    request: DecodingRequest = field(repr=False)
    texts: TextStream = field(repr=False)
    num_rows: int
    on_event: Callable[[ServiceEvent], None] = field(repr=False)
    wake: Callable[[], None] = field(repr=False)
    is_cancelled: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    def cancel(self) -> None:
        """Cancel it, from any thread: it ends before the next engine call."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self.wake()
