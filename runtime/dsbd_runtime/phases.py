"""Log lines of long phases, such as opening an engine.

A phase logs one line at its beginning, and one at its end, whose record has the attribute
``seconds``. The commands print them if the phase takes long
(``dsbd_ort.commands.progress.slow_phases``).
"""

import contextlib
import logging
import time
from collections.abc import Iterator

PHASES = logging.getLogger(__name__)


@contextlib.contextmanager
def phase(line: str) -> Iterator[None]:
    """Log a line at level INFO before the block, and again with its seconds after it."""
    PHASES.info("%s", line)
    began = time.monotonic()
    yield
    seconds = time.monotonic() - began
    PHASES.info("%s: %.1f s", line, seconds, extra={"seconds": seconds})


def shown_bytes(num_bytes: int) -> str:
    """Return a size as text for people, such as 1.8 GB or 12 MB."""
    tenths, millions = num_bytes // 10**8, num_bytes // 10**6  # exact for numbers of any size
    return f"{tenths // 10}.{tenths % 10} GB" if num_bytes >= 10**9 else f"{millions} MB"
