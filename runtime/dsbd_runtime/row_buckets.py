"""The few sizes that a device sees: rows of a call rounded up to powers of two."""

from __future__ import annotations


def row_bucket(num_rows: int, limit: int) -> int:
    """Return the smallest power of two that holds ``num_rows``, at least 1, at most ``limit``.

    With a limit of 256: 0 and 1 give 1, 3 gives 4, 33 gives 64, 200 gives 256.
    """
    return min(1 << max(num_rows - 1, 0).bit_length(), limit)


def padded_rows(num_new: int, limit: int) -> int:
    """Return the rows that ``num_new`` rows take when they go in calls of at most ``limit`` rows.

    Only the last call is padded: with a limit of 256, 300 rows take 256 + 64.
    """
    rest = num_new % limit
    return num_new - rest + (row_bucket(rest, limit) if rest else 0)
