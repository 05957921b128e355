"""How many requests a service takes, and how many cache rows they share."""

from __future__ import annotations

from dataclasses import dataclass

from dsbd_ort.number_checks import MOST_BYTES, check_count
from dsbd_runtime.bundle import ROLES, Bundle
from dsbd_runtime.errors import InputError
from dsbd_runtime.kv_cache import bucket_capacity, row_bytes

_USUAL_ROWS = 2048


@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """What a service may use.

    Attributes:
        max_requests: live at a time; they share the engine calls.
        max_queued: taken beyond those: they wait. One more is refused.
        kv_bytes: most bytes that the caches of both engines take (one of their buffers twice for a
            moment when they grow). None: enough for max_requests requests of 2,048 rows, and for
            one of the whole context.
    """

    max_requests: int = 8
    max_queued: int = 64
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        check_count("max_requests", self.max_requests, 1)
        check_count("max_queued", self.max_queued, 0)
        if self.kv_bytes is not None:
            check_count("kv_bytes", self.kv_bytes, 1, MOST_BYTES)


def cache_rows(limits: ServiceLimits, bundle: Bundle) -> int:
    """Return the rows that each engine's cache may hold.

    Caches grow in steps (``bucket_capacity``): the largest that stays within ``kv_bytes``.

    Raises:
        InputError: not even the smallest cache does.
    """
    entries = [bundle.entry(role) for role in ROLES]
    if limits.kv_bytes is None:
        context = min(entry.context_length for entry in entries)
        return bucket_capacity(max(limits.max_requests * _USUAL_ROWS, 2 * context))
    bytes_of_row = sum(row_bytes(entry.kv) for entry in entries)
    affordable = limits.kv_bytes // bytes_of_row
    rows = 0
    while (bucket := bucket_capacity(rows + 1)) <= affordable:
        rows = bucket
    if rows == 0:
        least = bucket_capacity(1) * bytes_of_row
        raise InputError(
            f"kv_bytes is {limits.kv_bytes}, but the smallest caches of this bundle take {least} "
            "bytes; give more"
        )
    return rows
