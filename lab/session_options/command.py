"""Session options of ONNX Runtime, each against those in use.

BUNDLES are made of one twin, in fp32 and quantized (lab/run speed makes them). Engines get
random tokens behind caches of --capacity rows. Every option is measured against the runtime's own
settings, in turns in one process. The last tables are the cost of a call by its rows, and of a
target call between four draft calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
import onnx_ir as ir
import onnxruntime as ort
from rich.progress import track

from dsbd_export.passes.optimize import group_query_heads
from dsbd_ort.benchmark.report import precision_name
from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle
from lab.frame.page import BUNDLES, RESULTS, Page, ratio_cell, spread_cell, writes
from lab.frame.random_calls import RandomCalls
from lab.frame.rounds import Timings, time_in_rounds
from lab.session_options.choices import CHOICES, SHARINGS, Change, Sharing, as_it_is
from scripts.document_sections import table

ROWS = (1, 4, 12)
ALL_ROWS = (1, 2, 4, 8, 12, 16, 24, 32)
TARGET_ROWS, DRAFT_ROWS, DRAFT_CALLS = 12, 4, 4
CALLS_A_ROUND = 3
TODAY = "as it is"


@dataclass(frozen=True)
class Conditions:
    """Settings of all measurements: rows of the caches, threads of a call, rounds."""

    capacity: int
    threads: int
    rounds: int

    def engine(
        self,
        bundle: Bundle,
        role: str,
        row_counts: tuple[int, ...],
        change: Change = as_it_is,
        *,
        is_grouped: bool = False,
    ) -> RandomCalls:
        """Open an engine under the runtime's options with ``change`` made to them."""
        graph = None
        if is_grouped:
            model = ir.load(bundle.model_path(role))
            group_query_heads(model)
            graph = ir.to_proto(model).SerializeToString()
        return RandomCalls.opened(
            bundle,
            role,
            threads=self.threads,
            change=change,
            row_counts=row_counts,
            capacity=self.capacity,
            graph=graph,
        )

    def timings(self, calls: Mapping[str, Callable[[], None]]) -> Timings:
        """Time ``calls`` side by side."""
        return time_in_rounds(calls, num_rounds=self.rounds, calls_a_round=CALLS_A_ROUND)


def choice_rows(bundle: Bundle, conditions: Conditions) -> Iterator[tuple[str, ...]]:
    """Yield a row a choice: milliseconds before and after for each number of rows, the ratio."""
    today = conditions.engine(bundle, "target", ROWS)
    precision = precision_name(bundle.entry("target"))
    for choice in track(CHOICES, description=precision, transient=True):
        changed = conditions.engine(
            bundle, "target", ROWS, choice.change, is_grouped=choice.is_grouped
        )
        cells = []
        for rows in ROWS:
            calls = {TODAY: today.call_of(rows), choice.name: changed.call_of(rows)}
            cells.append(compared(conditions.timings(calls), choice.name))
        yield choice.name, precision, *cells, choice.verdict


def compared(found: Timings, name: str) -> str:
    """Return the cell of a choice: before -> after, and the ratio with its quartiles."""
    before, after = found.milliseconds(TODAY).median, found.milliseconds(name).median
    return f"{before:.2f} -> {after:.2f}, {ratio_cell(found.ratio(name, TODAY))}"


def costs_by_rows(bundle: Bundle, conditions: Conditions) -> list[str]:
    """Return milliseconds of one target call, for every number of rows."""
    target = conditions.engine(bundle, "target", ALL_ROWS)
    return costs({str(rows): target.call_of(rows) for rows in ALL_ROWS}, conditions)


def costs_by_sharing(bundle: Bundle, conditions: Conditions) -> list[str]:
    """Return milliseconds of one iteration, for every way to share the cores."""
    found = []
    for role in ("draft", "target"):
        of_role = [sharing for sharing in SHARINGS if sharing.draft_role == role]
        pairs = track(of_role, description="opening pairs", transient=True)
        calls = {sharing.name: iteration(bundle, sharing, conditions) for sharing in pairs}
        found += costs(calls, conditions)
    return found


def costs(calls: Mapping[str, Callable[[], None]], conditions: Conditions) -> list[str]:
    """Return a cell a call: median and quartiles, in milliseconds."""
    found = conditions.timings(calls)
    return [spread_cell(found.milliseconds(name)) for name in calls]


def iteration(bundle: Bundle, sharing: Sharing, conditions: Conditions) -> Callable[[], None]:
    """Return a function that calls the draft four times and the target once."""
    target = conditions.engine(bundle, "target", (TARGET_ROWS,), sharing.target)
    draft = conditions.engine(bundle, sharing.draft_role, (DRAFT_ROWS,), sharing.draft)
    call_target, call_draft = target.call_of(TARGET_ROWS), draft.call_of(DRAFT_ROWS)

    def run() -> None:
        for _ in range(DRAFT_CALLS):
            call_draft()
        call_target()

    return run


@click.command(help=__doc__)
@BUNDLES
@click.option("--capacity", default=256, show_default=True, help="Rows of the caches.")
@click.option("--rounds", default=6, show_default=True)
@writes(RESULTS / "session_options.md")
def main(bundles: tuple[Path, ...], capacity: int, rounds: int, page: Page) -> None:
    """Measure all three tables and write them."""
    page.begin("session options")
    opened = [open_bundle(path) for path in bundles]
    conditions = Conditions(capacity, page.threads, rounds)
    names = [precision_name(bundle.entry("target")) for bundle in opened]
    counts = [f"{rows} row{'s' * (rows > 1)}, ms, ratio" for rows in ROWS]
    choices = [row for bundle in opened for row in choice_rows(bundle, conditions)]
    by_rows = zip(map(str, ALL_ROWS), *(costs_by_rows(b, conditions) for b in opened), strict=True)
    sharings = [f"**{sharing.name}**" if sharing.is_kept else sharing.name for sharing in SHARINGS]
    by_sharing = zip(sharings, *(costs_by_sharing(b, conditions) for b in opened), strict=True)
    title = f"{DRAFT_CALLS} draft calls of {DRAFT_ROWS} rows, a target call of {TARGET_ROWS}, ms"
    lines = [
        *table(["changed", "precision", *counts, "today"], choices),
        "",
        *table(["rows of a target call, ms", *names], by_rows),
        "",
        *table([title, *names], by_sharing),
        "",
        "The large draft is a second copy of the target. Bold: the settings of the runtime.",
    ]
    page.write(
        "session options",
        lines,
        f"onnxruntime {ort.__version__}",
        f"caches of {capacity} rows; medians with quartiles over {rounds} rounds of "
        f"{CALLS_A_ROUND} calls, ratios within a round",
    )
