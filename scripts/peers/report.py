"""Report of a comparison, the JSON of scripts/compare_peers, and its tables."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from document_section import ratio_cell, spread_cell, table
from dsbd_ort.benchmark.bootstrap import Estimate, Spread
from dsbd_ort.benchmark.machine import Machine, this_machine
from peers.catalog import OURS, Peer
from peers.prepare import NotRun, Pair, checkpoint_key, prepare
from peers.rounds import Plan, Request, measure_rounds
from peers.summary import BARS, BarResult, Requests, Row

COLUMNS = (
    *("tool", "version", "precision", "what it did", "tokens/s", "new tokens"),
    *("ours / theirs", "peak memory, MB", "same tokens"),
)
BAR_COLUMNS = ("ours", "over", "precision", "aimed at", "measured")


@dataclass(frozen=True, kw_only=True)
class PeersReport:
    """The report of a comparison; nested names are those of the dataclasses.

    Attributes:
        created: when it began, ISO 8601, UTC.
        params: size of the twin.
        checkpoints: key of both checkpoints (see conversion.checkpoint_key).
        installs: arguments of pip, by tool.
        rows: one for every run, including those that failed.
        bars: the target ratios.
        requests: all measurements, in order.
    """

    created: str
    params: str
    checkpoints: str
    machine: Machine
    threads: int
    rounds: int
    max_new_tokens: int
    prompts: list[list[int]]
    installs: dict[str, tuple[tuple[str, ...], ...]]
    rows: list[Row]
    bars: list[BarResult]
    requests: list[Request]


def compare(
    peers: Sequence[Peer],
    pair: Pair,
    plan: Plan,
    work: Path,
    *,
    params: str,
    checkout: Path | None,
    threads: int,
    report: Callable[[str], None],
) -> PeersReport:
    """Prepare and measure all runs; return the report."""
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = this_machine()  # before the load is our own
    runs = [run for peer in peers for run in prepare(peer, pair, work, checkout, threads)]
    not_run = [run for run in runs if isinstance(run, NotRun)]
    ready = [run for run in runs if not isinstance(run, NotRun)]
    outcomes = list(measure_rounds(ready, plan, work / "logs", report))
    requests = [outcome for outcome in outcomes if isinstance(outcome, Request)]
    not_run += [outcome for outcome in outcomes if isinstance(outcome, NotRun)]
    for item in not_run:
        report(f"{item.peer.name}, {item.run.name}, {item.run.precision}: {item.reason}")
    by_row = Requests(requests, OURS)
    reasons = {(item.peer.name, item.run.name, item.run.precision): item.reason for item in not_run}
    return PeersReport(
        created=created,
        params=params,
        checkpoints=checkpoint_key(pair.target, pair.draft),
        machine=machine,
        threads=threads,
        rounds=plan.num_rounds,
        max_new_tokens=plan.max_new_tokens,
        prompts=[list(prompt) for prompt in plan.prompts],
        installs={peer.name: peer.installs for peer in peers},
        rows=[
            by_row.row(peer, run, reasons.get((peer.name, run.name, run.precision)))
            for peer in peers
            for run in peer.runs
        ],
        bars=[by_row.bar(bar) for bar in BARS],
        requests=requests,
    )


def tables_of(report: dict[str, Any]) -> str:
    """Return the rows, the bars and how they were measured."""
    rows = "\n".join(table(COLUMNS, [_cells(row) for row in report["rows"]]))
    bars = "\n".join(table(BAR_COLUMNS, [_bar_cells(bar) for bar in report["bars"]]))
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
    same = ""
    if row["num_identical"] is not None:
        same = f"{row['num_identical']}/{row['num_requests']} as {row['same_tokens_as']}"
    ratio = _interval(row["ratio"])
    return (
        *name,
        spread_cell(Spread(**row["tokens_per_s"])),
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
    return "" if estimate is None else ratio_cell(Estimate(**estimate))
