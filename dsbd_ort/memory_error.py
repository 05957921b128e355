"""What a lack of memory in the loop means to who asked."""

from __future__ import annotations

from dsbd_runtime.errors import CapacityError


def capacity_error(error: MemoryError) -> CapacityError:
    """Return the error that says how to mend it."""
    return CapacityError(
        f"no memory for this request ({error}); ask for fewer beams, a shorter draft or fewer new "
        "tokens"
    )
