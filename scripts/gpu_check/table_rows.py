"""The rows of the tables, from the results of the pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_check.pieces import BENCH_PREFIX, PARITY_PREFIX
from gpu_check.results import DONE, Result

NOTHING = "-"
BENCH_COLUMNS = (
    "bundle", "run", "tokens/s", "speed-up", "95 %", "same tokens", "host %", "KV MB", "J/token",
    "J of baseline / J",
)  # fmt: skip
PARITY_COLUMNS = (
    "bundle", "same tokens", "near-ties", "largest gap", "mean TV", "largest TV", "verdict"
)  # fmt: skip
Row = tuple[str, ...]


def bench_rows(results: Sequence[Result]) -> list[Row]:
    """Return a row for every run of every benchmark that was done."""
    rows = []
    for result in _done(results, BENCH_PREFIX):
        runs = {run["name"]: run for run in result.values["runs"]}
        for run in runs.values():
            rows.append(_bench_row(result.piece.removeprefix(BENCH_PREFIX), run, runs))
    return rows


def parity_rows(results: Sequence[Result]) -> list[Row]:
    """Return a row for every comparison with the CPU that was done."""
    rows = []
    for result in _done(results, PARITY_PREFIX):
        found = result.values
        gaps = ["beyond top-k" if gap is None else f"{gap:.1e}" for gap in _largest(found["gaps"])]
        rows.append(
            (
                result.piece.removeprefix(PARITY_PREFIX),
                f"{found['num_identical']}/{found['num_compared']}",
                f"{found['num_near_ties']}/{len(found['gaps'])} (gap up to {found['gap_limit']:g})",
                *(gaps or [NOTHING]),
                f"{found['mean_variation']:.1e}",
                f"{found['max_variation']:.1e} (limit {found['variation_limit']:g})",
                "within limits" if found["is_within_limits"] else "beyond limits",
            )
        )
    return rows


def _done(results: Sequence[Result], prefix: str) -> list[Result]:
    return [r for r in results if r.state == DONE and r.piece.startswith(prefix)]


def _largest(gaps: Sequence[float | None]) -> list[float | None]:
    """Return the largest gap, None being larger than any number; nothing for no gap."""
    return sorted(gaps, key=lambda gap: float("inf") if gap is None else gap)[-1:]


def _bench_row(bundle: str, run: dict[str, Any], runs: dict[str, dict[str, Any]]) -> Row:
    split, comparison = run["seconds_per_token"], run["comparison"]
    joules, kv_bytes = run["energy_joules_per_token"], run["kv_bytes_peak"]
    speed_up = interval = same = saving = NOTHING
    if comparison is not None:
        estimate = comparison["speedup"]
        speed_up = f"{estimate['value']:.2f}"
        interval = f"{estimate['low']:.2f} to {estimate['high']:.2f}"
        same = f"{comparison['num_identical']}/{comparison['num_pairs']}"
        if joules:
            saving = f"{runs[comparison['baseline']]['energy_joules_per_token'] / joules:.2f}"
    return (
        bundle,
        run["name"],
        f"{run['tokens_per_s']['median']:.1f}",
        speed_up,
        interval,
        same,
        f"{100 * split['host'] / sum(split.values()):.0f}",
        NOTHING if kv_bytes is None else f"{kv_bytes / 1e6:.1f}",
        NOTHING if joules is None else f"{joules:.3f}",
        saving,
    )
