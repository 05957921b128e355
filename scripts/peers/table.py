"""The tables of a comparison in markdown, from its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

COLUMNS = ("tool", "version", "precision", "what it did", "tokens/s", "new tokens")
COLUMNS += ("ours / theirs", "peak memory, MB", "same tokens")
BAR_COLUMNS = ("ours", "over", "precision", "aimed at", "measured")


def tables_of(report: dict[str, Any]) -> str:
    """Return the rows, the bars and how they were measured."""
    rows = _table(COLUMNS, [_cells(row) for row in report["rows"]])
    bars = _table(BAR_COLUMNS, [_bar_cells(bar) for bar in report["bars"]])
    settings = {
        f"{row['peer']}, {row['precision']}": row["settings"]
        for row in report["rows"]
        if row["settings"]
    }
    said = "\n".join(f"* {name}: {words}." for name, words in settings.items())
    return "\n\n".join((rows, _how(report), said, bars))


def _how(report: dict[str, Any]) -> str:
    return (
        f"{report['created'][:10]}, {report['params']} twin, {report['machine']['processor']}, "
        f"{report['threads']} threads, {len(report['prompts'])} prompts x {report['rounds']} "
        f"rounds, {report['max_new_tokens']} new tokens; medians with quartiles, ratios with a "
        "95 % bootstrap interval over pairs. No end token: every sequence has the full length, so "
        "length penalties and early stopping decide nothing."
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    name = (row["peer"], row["version"] or "", row["precision"], row["run"])
    if row["reason"]:
        reason = " ".join(row["reason"].replace("|", "\\|").split())
        return (*name, reason, "", "", "", "")
    rate = row["tokens_per_s"]
    same = ""
    if row["num_identical"] is not None:
        same = f"{row['num_identical']}/{row['num_requests']} as {row['same_tokens_as']}"
    ratio = _interval(row["ratio"])
    return (
        *name,
        f"{rate['median']:.1f} ({rate['quartile_1']:.1f} to {rate['quartile_3']:.1f})",
        f"{row['num_tokens']:.1f}",
        f"{ratio} of {row['counterpart']}" if ratio else "",
        f"{row['peak_bytes'] / 1e6:.0f}",
        same,
    )


def _bar_cells(bar: dict[str, Any]) -> tuple[str, ...]:
    over = f"{bar['peer']}, {bar['run']}"
    measured = _interval(bar["ratio"]) or "not measured"
    return bar["ours"], over, bar["precision"], f"{bar['aim']:g}", measured


def _interval(estimate: dict[str, float] | None) -> str:
    if estimate is None:
        return ""
    return f"**{estimate['value']:.2f}** ({estimate['low']:.2f} to {estimate['high']:.2f})"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join(lines + [f"| {' | '.join(cells)} |" for cells in rows])
