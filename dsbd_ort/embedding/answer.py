"""Answer one request of a service, in the thread that asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from dsbd_errors import DsbdError
from dsbd_ort.engine import Service, ServiceEvent
from dsbd_ort.generated import GenerationResult, StreamStep


def answer(
    service: Service,
    prompt: str | Sequence[int],
    options: Mapping[str, Any],
    is_wanted: Callable[[StreamStep], bool],
) -> GenerationResult | None:
    """Return the result, None where it was cancelled.

    Args:
        service: an open one.
        prompt: text or token ids.
        options: fields of DecodingConfig.
        is_wanted: gets every step; False cancels the request.
    """
    events: SimpleQueue[ServiceEvent] = SimpleQueue()
    request = service.submit(prompt, options, events.put)
    is_cancelled = False
    try:
        while True:
            event = events.get()
            if isinstance(event, StreamStep):
                if not is_cancelled and not is_wanted(event):
                    is_cancelled = True
                    request.cancel()
            elif isinstance(event, DsbdError):
                raise event
            else:
                return event if isinstance(event, GenerationResult) and not is_cancelled else None
    finally:
        request.cancel()  # where is_wanted raises, nobody else would
