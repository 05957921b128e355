"""Tables of dsbd-bench: speed and quality of every run, and how its time is spent."""

from collections.abc import Callable, Sequence

from rich.table import Table

from dsbd_ort.benchmark.advice import Advice
from dsbd_ort.benchmark.invariance import PairCount
from dsbd_ort.benchmark.report import RunSummary, Verdict

Cell = Callable[[RunSummary], str]
_COST_ROWS = (1, 2, 4, 8, 16)
NOTHING = "-"  # does not apply, or was not measured


def _speedup(run: RunSummary) -> str:
    if run.comparison is None:
        return NOTHING
    return (
        Verdict.NOT_DRAFTED.value if run.drafted_nothing else f"{run.comparison.speedup.value:.2f}"
    )


def _speedup_interval(run: RunSummary) -> str:
    if run.comparison is None or run.drafted_nothing or not run.comparison.has_interval:
        return NOTHING
    return f"{run.comparison.speedup.low:.2f} to {run.comparison.speedup.high:.2f}"


def _same_tokens(run: RunSummary) -> str:
    if run.comparison is None:
        return NOTHING
    return f"{run.comparison.num_identical}/{run.comparison.num_pairs}"


def _time_split(run: RunSummary) -> str:
    split = run.seconds_per_token
    parts = (split.draft, split.target, split.host)
    return " / ".join(f"{100 * part / sum(parts):.0f}" for part in parts)


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


VALUE_COLUMNS: dict[str, Cell] = {
    "tokens/s": lambda run: f"{run.tokens_per_s.median:.1f}",
    "quartiles": lambda run: (
        f"{run.tokens_per_s.quartile_1:.1f} to {run.tokens_per_s.quartile_3:.1f}"
    ),
    "speed-up": _speedup,
    "95 %": _speedup_interval,
    "same tokens": _same_tokens,
    "logprob/token": lambda run: f"{run.logprob_per_token:.3f}",
}
WORK_COLUMNS: dict[str, Cell] = {
    "draft / target / host %": _time_split,
    "host us/iteration": lambda run: f"{run.host_us_per_iteration:.0f}",
    "tokens/iteration": lambda run: _number(run.mean_acceptance_length),
    "accepted": lambda run: _number(run.draft_acceptance_rate),
    "width": lambda run: _number(run.mean_beam_width),
    "rows/iteration": lambda run: f"{run.target_rows_per_iteration:.1f}",
    "KV MB": lambda run: NOTHING if run.kv_bytes_peak is None else f"{run.kv_bytes_peak / 1e6:.1f}",
    "J/token": lambda run: _number(run.energy_joules_per_token),
}


def bench_table(runs: Sequence[RunSummary], title: str, columns: dict[str, Cell]) -> Table:
    """Return a table with one row per run: its name and a cell per column."""
    table = Table(title=title)
    table.add_column("run", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(run.name, *(cell(run) for cell in columns.values()))
    return table


def verdict_line(runs: Sequence[RunSummary]) -> str:
    """Return the verdicts on runs with a draft, such as "pays: mine 1.52; not drafted: dsbd"."""
    names: dict[Verdict, list[str]] = {verdict: [] for verdict in Verdict}
    for run in runs:
        if run.comparison is not None and (verdict := run.verdict) is not None:
            is_drafted = verdict is not Verdict.NOT_DRAFTED
            speedup = f" {run.comparison.speedup.value:.2f}" if is_drafted else ""
            names[verdict].append(run.name + speedup)
    return "; ".join(f"{verdict.value}: {', '.join(of)}" for verdict, of in names.items() if of)


def cost_table(advice: Advice, title: str) -> Table:
    """Return a table of the milliseconds of a call of each engine, by the call's rows."""
    table = Table(title=title)
    for column in ("rows of a call", "target, ms", "draft, ms"):
        table.add_column(column, justify="right")
    target, draft = (
        curve.up_to(_COST_ROWS[-1]) for curve in (advice.costs.target, advice.costs.draft)
    )
    for rows in _COST_ROWS:
        table.add_row(str(rows), f"{1e3 * target[rows]:.1f}", f"{1e3 * draft[rows]:.1f}")
    return table


def gain_table(advice: Advice) -> Table:
    """Return a table with one row per strategy: its expected and measured speed-up by the draft."""
    table = Table(title="speed-up by the draft, without prompts")
    table.add_column("strategy", no_wrap=True)
    for column in ("beams", "tokens/iteration", "expected", "measured"):
        table.add_column(column, justify="right")
    for gain in advice.gains:
        numbers = (gain.tokens_per_iteration, gain.expected, gain.measured)
        table.add_row(gain.strategy, str(gain.num_beams), *(f"{each:.2f}" for each in numbers))
    return table


def invariance_table(pairs: Sequence[PairCount], title: str) -> Table:
    """Return a table with one row per pair of settings: how many requests, how many differ."""
    table = Table(title=title)
    table.add_column("settings", no_wrap=True)
    for column in ("requests", "other tokens", "other log-probabilities"):
        table.add_column(column, justify="right")
    for pair in pairs:
        counts = (pair.num_requests, pair.num_other_tokens, pair.num_other_logprobs)
        table.add_row(pair.name, *map(str, counts))
    return table
