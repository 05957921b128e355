"""A comparison from its beginning to its report, the JSON of scripts/compare_peers."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsbd_ort.benchmark.machine import Machine, this_machine
from peers.bars import BARS
from peers.catalog import OURS
from peers.conversion import checkpoint_key
from peers.peer import Peer
from peers.prepare import NotRun, Pair, prepare
from peers.rounds import Plan, Request, measure_rounds
from peers.summary import BarResult, Requests, Row


@dataclass(frozen=True, kw_only=True)
class PeersReport:
    """All that a comparison knows; nested names are those of the dataclasses.

    Attributes:
        created: when it began, ISO 8601, UTC.
        params: size of the twin.
        checkpoints: key of both checkpoints (see conversion.checkpoint_key).
        installs: arguments of pip, by tool.
        rows: one for every run, those that failed included.
        bars: the ratios that were aimed at.
        requests: what was measured, in order.
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
    """Make everything ready, measure it and return the report."""
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = this_machine()  # before the load is our own
    runs = [run for peer in peers for run in prepare(peer, pair, work, checkout, threads)]
    not_run = [run for run in runs if isinstance(run, NotRun)]
    ready = [run for run in runs if not isinstance(run, NotRun)]
    requests = []
    for outcome in measure_rounds(ready, plan, work / "logs", report):
        if isinstance(outcome, NotRun):
            not_run.append(outcome)
        else:
            requests.append(outcome)
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
