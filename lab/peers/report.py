"""Report of a comparison (the JSON of lab/run peers) and its tables."""

import datetime
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dsbd_ort import Pipeline
from dsbd_ort.benchmark.bootstrap import Estimate, Spread
from dsbd_ort.benchmark.machine import Machine, this_machine
from lab.frame.page import ratio_cell, spread_cell
from lab.peers.catalog import OURS
from lab.peers.comparison import COMPARISONS, STRATEGIES, Comparison
from lab.peers.prepare import NotRun, Pair, checkpoint_key, prepare
from lab.peers.rounds import Plan, Prompt, Request, measure_rounds
from lab.peers.summary import BarResult, Requests, Row
from scripts.document_sections import table
from scripts.machine import one_core_taken

LOGPROB = "mean log-probability"
REASON_LINES = 2  # lines shown of an error: some errors print their whole state
BAR_COLUMNS = ("ours", "over", "precision", "aimed at", "measured")


@dataclass(frozen=True, kw_only=True)
class PeersReport:
    """The report of a comparison; nested names are those of the dataclasses.

    Attributes:
        comparison: name in ``COMPARISONS``.
        created: time of the start, ISO 8601, UTC.
        params: size of the twin.
        is_busy: whether another process took one of the cores.
        checkpoints: hash of both checkpoints (see ``prepare.checkpoint_key``).
        installs: arguments of ``pip install``, by tool.
        rows: a row per run, including failed runs.
        bars: the target ratios.
        requests: all measurements, in the order in which they were made.
    """

    comparison: str
    created: str
    params: str
    is_busy: bool
    checkpoints: str
    machine: Machine
    threads: int
    rounds: int
    max_new_tokens: int
    prompts: list[Prompt]
    installs: dict[str, tuple[tuple[str, ...], ...]]
    rows: list[Row]
    bars: list[BarResult]
    requests: list[Request]


def compare(
    comparison: Comparison,
    names: Sequence[str],
    pair: Pair,
    plan: Plan,
    work: Path,
    *,
    params: str,
    is_busy: bool,
    threads: int,
    report: Callable[[str], None],
) -> PeersReport:
    """Prepare and measure our runs and those of the named tools; () stands for all tools."""
    peers = [peer for peer in comparison.peers if not names or peer.name in (OURS, *names)]
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = this_machine()  # before our own load
    runs = [run for peer in peers for run in prepare(peer, pair, work, threads)]
    not_run = [run for run in runs if isinstance(run, NotRun)]
    ready = [run for run in runs if not isinstance(run, NotRun)]
    with one_core_taken() if is_busy else nullcontext():
        outcomes = list(measure_rounds(ready, plan, work / "logs", report))
    requests = [outcome for outcome in outcomes if isinstance(outcome, Request)]
    if LOGPROB in comparison.columns:
        report("log-probabilities of what was said")
        requests = with_logprobs(requests, plan.prompts, pair.bundle_of("fp32"), threads)
    not_run += [outcome for outcome in outcomes if isinstance(outcome, NotRun)]
    for item in not_run:
        report(f"{item.peer.name}, {item.run.name}, {item.run.precision}: {item.reason}")
    by_row = Requests(requests, OURS)
    reasons = {(item.peer.name, item.run.name, item.run.precision): item.reason for item in not_run}
    return PeersReport(
        comparison=comparison.name,
        created=created,
        params=params,
        is_busy=is_busy,
        checkpoints=checkpoint_key(pair.target, pair.draft),
        machine=machine,
        threads=threads,
        rounds=plan.num_rounds,
        max_new_tokens=plan.max_new_tokens,
        prompts=list(plan.prompts),
        installs={peer.name: peer.installs for peer in peers},
        rows=[
            by_row.row(peer, run, reasons.get((peer.name, run.name, run.precision)))
            for peer in peers
            for run in peer.runs
        ],
        bars=[by_row.bar(bar) for bar in comparison.bars],
        requests=requests,
    )


def with_logprobs(
    requests: Sequence[Request], prompts: Sequence[Prompt], bundle: Path, threads: int
) -> list[Request]:
    """Return the requests with ``logprob``, which shows if a tool samples another distribution."""
    scored_requests: list[Request] = []
    logprob_of: dict[tuple[int, ...], float] = {}
    with Pipeline.from_bundle(bundle, num_threads=threads) as pipeline:
        for request in requests:
            prompt = prompts[request.prompt_index].token_ids
            if (text := (*prompt, *request.token_ids)) not in logprob_of:
                scored = pipeline.generate(list(text), max_new_tokens=1, prompt_logprobs=True)
                assert scored.prompt_logprobs is not None  # asked for
                logprobs = scored.prompt_logprobs.token_logprobs[len(prompt) :]
                logprob_of[text] = float(np.mean(np.array(logprobs, dtype=np.float64)))
            scored_requests.append(replace(request, logprob=logprob_of[text]))
    return scored_requests


def tables_of(report: dict[str, Any], comparison: Comparison | None = None) -> str:
    """Return the tables of the rows and the target ratios, and how they were measured.

    comparison: the measured comparison; None: the report's name in ``COMPARISONS``.
    """
    comparison = comparison or COMPARISONS[report.get("comparison", STRATEGIES)]
    cells = [_cells(row, comparison.columns) for row in report["rows"]]
    parts = ["\n".join(table(comparison.columns, cells)), _how(report, comparison)]
    settings = {
        f"{row['peer']}, {row['precision']}": row["settings"]
        for row in report["rows"]
        if row["settings"]
    }
    parts.append("\n".join(f"* {name}: {words}." for name, words in settings.items()))
    if report["bars"]:
        parts.append("\n".join(table(BAR_COLUMNS, [_bar_cells(bar) for bar in report["bars"]])))
    return "\n\n".join(parts)


def _how(report: dict[str, Any], comparison: Comparison) -> str:
    busy = ", another process on one of the cores" if report.get("is_busy") else ""
    return (
        f"{report['created'][:10]}, {comparison.subject.format(params=report['params'])}, "
        f"{report['machine']['processor']}, "
        f"{report['threads']} threads{busy}, {len(report['prompts'])} prompts x {report['rounds']} "
        f"rounds, {report['max_new_tokens']} new tokens; medians with quartiles, ratios with a "
        f"95 % bootstrap interval over pairs. {comparison.note}"
    )


NAMES: dict[str, str] = {  # columns that every row fills
    "tool": "peer",
    "version": "version",
    "precision": "precision",
    "what it did": "run",
}


def _cells(row: dict[str, Any], columns: Sequence[str]) -> tuple[str, ...]:
    names = [row[NAMES[column]] or "" for column in columns if column in NAMES]
    measured = [column for column in columns if column not in NAMES]
    if row["reason"]:
        lines = row["reason"].splitlines()[:REASON_LINES]
        reason = " ".join(" ".join(lines).replace("|", "\\|").split())
        return (*names, reason, *("" for _ in measured[1:]))
    return (*names, *(MEASURED[column](row) for column in measured))


def _tokens_per_s(row: dict[str, Any]) -> str:
    return spread_cell(Spread(**row["tokens_per_s"]))


def _ratio(row: dict[str, Any]) -> str:
    ratio = _interval(row["ratio"])
    return f"{ratio} of {row['counterpart']}" if ratio else ""


def _time_ratio(row: dict[str, Any]) -> str:
    ratio = _interval(row["time_ratio"])
    return f"{ratio} of {row['counterpart']}" if ratio else ""


def _milliseconds(row: dict[str, Any]) -> str:
    seconds = Spread(**row["searches"]["seconds"])
    cells = (1e3 * seconds.median, 1e3 * seconds.quartile_1, 1e3 * seconds.quartile_3)
    return spread_cell(Spread(*cells))


def _illegal(row: dict[str, Any]) -> str:
    searches = row["searches"]
    share = 1 - searches["num_legal"] / searches["num_returned"]
    return f"{share:.1%} of {searches['num_returned']}"


def _same_search(row: dict[str, Any]) -> str:
    searches = row["searches"]
    if searches["num_same"] is None:
        return ""
    cell = f"{searches['num_same']}/{row['num_requests']} as {row['same_search_as']}"
    difference = searches["score_difference"]
    return cell if difference is None else f"{cell}, within {difference:.0e}"


def _same_tokens(row: dict[str, Any]) -> str:
    if row["num_identical"] is None:
        return ""
    return f"{row['num_identical']}/{row['num_requests']} as {row['same_tokens_as']}"


def _tokens_per_iteration(row: dict[str, Any]) -> str:
    number = row["tokens_per_iteration"]
    return "" if number is None else f"{number:.2f}"


MEASURED: dict[str, Callable[[dict[str, Any]], str]] = {
    "tokens/s": _tokens_per_s,
    "new tokens": lambda row: f"{row['num_tokens']:.1f}",
    "valid": lambda row: f"{row['num_valid']}/{row['num_requests']}",
    "tokens/iteration": _tokens_per_iteration,
    "times as fast as its own without": lambda row: _interval(row["speedup"]),
    "ours / theirs": _ratio,
    "peak memory, MB": lambda row: f"{row['peak_bytes'] / 1e6:.0f}",
    "same tokens": _same_tokens,
    LOGPROB: lambda row: _interval(row.get("logprob")),
    "ms a request": _milliseconds,
    "legal ids/s": lambda row: spread_cell(Spread(**row["searches"]["legal_per_s"])),
    "illegal": _illegal,
    "their time / ours": _time_ratio,
    "same sequences, scores": _same_search,
}


def _bar_cells(bar: dict[str, Any]) -> tuple[str, ...]:
    over = f"{bar['peer']}, {bar['run']}"
    measured = _interval(bar["ratio"]) or "not measured"
    ours = bar.get("ours_precision")
    ours = bar["ours"] if ours is None else f"{bar['ours']}, {ours}"
    return ours, over, bar["precision"], f"{bar['aim']:g}", measured


def _interval(estimate: dict[str, float] | None) -> str:
    return "" if estimate is None else ratio_cell(Estimate(**estimate))
