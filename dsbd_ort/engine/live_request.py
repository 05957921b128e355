"""A request that a service has taken: waiting, live or over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dsbd_ort.decoding import DecodingRequest
from dsbd_ort.engine.events import ServiceEvent
from dsbd_ort.text_stream import TextStream


@dataclass(eq=False, kw_only=True)
class LiveRequest:
    """One request.

    Attributes:
        request: what to decode.
        texts: makes text of its steps.
        num_rows: cache rows that it may need.
        on_event: is told what becomes of it.
        wake: has the service look at its requests.
        is_cancelled: whether its caller has given it up.
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
        """Give it up, from any thread: it ends before the next engine call."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self.wake()
