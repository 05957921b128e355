"""What a service tells about a request: steps, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from dsbd_errors import DsbdError
from dsbd_ort.generated import GenerationResult, StreamStep


@dataclass(frozen=True)
class Cancelled:
    """The request was given up, by its caller or because the service was closed."""


Ending = GenerationResult | DsbdError | Cancelled
"""The last event of a request."""

ServiceEvent = StreamStep | Ending
