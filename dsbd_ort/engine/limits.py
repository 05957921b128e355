"""Limits of a service, and the bounds of every number in settings.

Every number in settings is finite and within the range of clocks, sockets and memory.
"""

from dataclasses import dataclass

from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.attention.cache_entries import every_row
from dsbd_runtime.parts.attention.kv_cache import bucket_capacity, row_bytes
from dsbd_runtime.parts.recent.recent_rows import path_bytes
from dsbd_runtime.typed_json import in_short

MOST = 2**31 - 1  # upper bound of counts
MOST_BYTES = 2**53  # upper bound of cache and body sizes; exact in every JSON parser
MOST_SECONDS = 7 * 24 * 3600
"""Upper bound of timeouts: a week, which clocks and sockets can count in milliseconds."""
_DEFAULT_ROWS = 2048


def check_count(name: str, value: object, least: int, most: int = MOST) -> None:
    """Raise InputError unless ``value`` is a whole number from ``least`` to ``most``."""
    if type(value) is not int or not least <= value <= most:
        raise InputError(
            f"{name} is {in_short(value)}; expected a whole number from {least} to {most}"
        )


def check_seconds(name: str, value: object, *, may_be_zero: bool = False) -> None:
    """Raise InputError unless ``value`` is a number of seconds, at most a week."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if 0 < value <= MOST_SECONDS or (may_be_zero and value == 0):
            return
    raise InputError(
        f"{name} is {in_short(value)}; expected seconds, {'from' if may_be_zero else 'more than'} "
        f"0 up to {MOST_SECONDS}"
    )


@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """Limits of a service.

    Attributes:
        max_requests: number of requests that run concurrently; they share the engine calls.
        max_queued: number of requests that may wait in addition; further ones are rejected.
        kv_bytes: memory of all engines' caches (while they grow, one buffer exists twice). None:
            enough for max_requests requests of 2,048 rows, and for one request of the whole
            context. For engines with convolutions or recurrences it includes the states and recent
            rows of max_requests requests with one path each; beams on different paths need more.
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
    """Return the rows that each engine's cache may hold; InputError: ``kv_bytes`` is too small.

    Caches grow in steps (``bucket_capacity``); the result is the largest step within ``kv_bytes``.
    """
    if limits.kv_bytes is None:
        wanted = max(limits.max_requests * _DEFAULT_ROWS, 2 * bundle.context_length)
        return bucket_capacity(wanted)
    entries = bundle.entry_by_role.values()
    bytes_of_row = max(1, sum(row_bytes(every_row(entry.caches)) for entry in entries))
    bytes_of_paths = limits.max_requests * sum(path_bytes(entry.caches) for entry in entries)
    affordable = (limits.kv_bytes - bytes_of_paths) // bytes_of_row
    rows = 0
    while (bucket := bucket_capacity(rows + 1)) <= affordable:
        rows = bucket
    if rows == 0:
        least = bucket_capacity(1) * bytes_of_row + bytes_of_paths
        fix = f"raise it, or lower max_requests ({limits.max_requests})"
        raise InputError(
            f"kv_bytes is {limits.kv_bytes}, but the smallest caches of this bundle take {least} "
            f"bytes; {fix if bytes_of_paths else 'raise it'}"
        )
    return rows
