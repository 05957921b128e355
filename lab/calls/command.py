"""Engine calls of bundles side by side, on a quiet machine and next to a busy process.

Every bundle with every --setting is an engine. Its target is called with random tokens after full
caches; engines take turns. Then this is repeated while another process uses one core. Bundles of
the same precision share a section of the page, with ratios to the first engine. The bytes of
weights read per second, in calls of one row, are compared with the memory's bandwidth. The last
table has the times of opening the bundles in new processes, without and with a prepared engine
(--engine-cache), with their files in memory (warm) or only on disk (cold).

With --role draft the engines are the drafts, all precisions in one section. --together puts targets
of all precisions into one section.

\b
scripts/make_twin --params 150M --context 4096 -o TWIN
dsbd-export --target TWIN/target --draft TWIN/draft --logits topk:64 -o BUNDLE
dsbd-export --target TWIN/target --draft TWIN/draft --logits topk:64 --attention grouped -o BUNDLE2
"""  # noqa: D301

import itertools
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import click
import onnxruntime as ort

from dsbd_ort.benchmark.report import precision_name
from dsbd_runtime.bundle_files.bundle import ROLES, Bundle, open_bundle
from dsbd_runtime.parts.attention.kv_cache import bucket_capacity
from lab.calls.opening import time_opening
from lab.frame.page import BUNDLES, RESULTS, Page, ratio_cell, spread_cell, writes
from lab.frame.random_calls import Change, RandomCalls, product_bytes
from lab.frame.rounds import Timings, time_in_rounds
from scripts.document_sections import table
from scripts.machine import memory_bandwidth, one_core_taken

CONTEXTS, CALLS_A_ROUND = (64, 256, 1024, 4096), 3
ROWS_OF = {"target": (1, 4, 12, 20), "draft": (1, 2, 4, 8)}
BASE_CONTEXT = 256
DRAFTS, TOGETHER = "drafts", "precisions"  # names of sections in place of a precision


def _with_entry(key: str, value: str) -> Change:
    return lambda options: options.add_session_config_entry(key, value)


SETTINGS: dict[str, Change] = {
    "today": lambda options: None,
    "waits for milliseconds": _with_entry("session.intra_op.spin_duration_us", "-1"),
    "does not wait": _with_entry("session.intra_op.allow_spinning", "0"),
}


@dataclass(frozen=True)
class Engine:
    """One column of a table: a bundle opened in one way."""

    bundle: Bundle
    role: str
    setting: str
    threads: int
    row_counts: tuple[int, ...] = ROWS_OF["target"]

    @property
    def name(self) -> str:
        """Folder, and the setting if it is not today's."""
        folder = self.bundle.path.name
        return folder if self.setting == "today" else f"{folder}, {self.setting}"

    def open(self, contexts: tuple[int, ...]) -> dict[int, RandomCalls]:
        """Open the model; return its calls after full caches for each context."""
        first, *others = contexts
        calls = RandomCalls.opened(
            self.bundle,
            self.role,
            threads=self.threads,
            change=SETTINGS[self.setting],
            row_counts=self.row_counts,
            capacity=bucket_capacity(first),
        )
        return {first: calls, **{other: calls.after(bucket_capacity(other)) for other in others}}

    def label(self, context: int) -> str:
        """Name of the calls after one context."""
        return f"{self.name}, {context}"


@dataclass(frozen=True)
class Found:
    """Timings for one number of rows; ``busy`` is None if it was not measured."""

    quiet: Timings
    busy: Timings | None

    def median(self, engine: Engine, context: int) -> float:
        """Return the milliseconds of a call on the quiet machine."""
        return self.quiet.milliseconds(engine.label(context)).median


def measured(
    engines: list[Engine], contexts: tuple[int, ...], rounds: int, *, with_busy: bool
) -> dict[int, Found]:
    """Return timings by number of rows; all engines and contexts take turns."""
    opened = [(engine, engine.open(contexts)) for engine in engines]
    timed, row_counts = [], engines[0].row_counts
    for state in (nullcontext, one_core_taken) if with_busy else (nullcontext,):
        with state():
            timed.append({rows: _timings(opened, rows, rounds) for rows in row_counts})
    return {
        rows: Found(timed[0][rows], timed[1][rows] if with_busy else None) for rows in row_counts
    }


def _timings(
    opened: list[tuple[Engine, dict[int, RandomCalls]]], rows: int, rounds: int
) -> Timings:
    calls: dict[str, Callable[[], None]] = {
        engine.label(context): random_calls.call_of(rows)
        for engine, by_context in opened
        for context, random_calls in by_context.items()
    }
    return time_in_rounds(calls, num_rounds=rounds, calls_a_round=CALLS_A_ROUND)


def call_rows(
    engines: list[Engine], contexts: tuple[int, ...], timings: dict[int, Found]
) -> Iterator[tuple[str, ...]]:
    """Yield a row for each context, number of rows and engine."""
    first = engines[0]
    for context, (rows, here), engine in itertools.product(contexts, timings.items(), engines):
        label = engine.label(context)
        to_first = (
            "" if engine is first else ratio_cell(here.quiet.ratio(label, first.label(context)))
        )
        longer = ""
        if BASE_CONTEXT in contexts:
            longer = f"{here.quiet.ratio(label, engine.label(BASE_CONTEXT)).median:.2f}"
        cells = ["", ""]
        if here.busy is not None:
            busy = here.busy.milliseconds(label)
            cells = [spread_cell(busy), f"**{busy.median / here.median(first, context):.2f}**"]
        ms = spread_cell(here.quiet.milliseconds(label))
        yield str(context), str(rows), engine.name, ms, to_first, longer, *cells


def bandwidth_rows(
    engines: list[Engine], context: int, timings: dict[int, Found], threads: int
) -> Iterator[tuple[str, ...]]:
    """Yield a row per engine: bytes of weights that it reads per second in calls of one row."""
    memory = memory_bandwidth(threads)
    for engine in engines:
        num_bytes = product_bytes(engine.bundle.model_path(engine.role))
        per_second = num_bytes / timings[1].median(engine, context) * 1e3
        speeds = (f"{per_second / 1e9:.1f}", f"{memory / 1e9:.1f}", f"{per_second / memory:.0%}")
        yield engine.name, f"{num_bytes / 1e6:.0f}", *speeds


def opening_rows(
    bundles: list[Bundle], threads: int, num_openings: int
) -> Iterator[tuple[str, ...]]:
    """Yield two rows per bundle: without and with a prepared engine."""
    for bundle in bundles:
        with tempfile.TemporaryDirectory() as folder:
            for name, cache in (("as it is", None), ("prepared", Path(folder))):
                first = time_opening(
                    bundle.path, threads, cache, is_cold=False
                )  # creates missing files
                cells = [f"{first.seconds:.2f}"]
                for is_cold in (True, False):
                    openings = [
                        time_opening(bundle.path, threads, cache, is_cold=is_cold)
                        for _ in range(num_openings)
                    ]
                    cells.append(f"{statistics.median(one.seconds for one in openings):.2f}")
                cells.append(f"{openings[-1].own_bytes / 1e6:.0f}")
                yield f"{bundle.path.name}, {name}", *cells


OPENING_COLUMNS = ("bundle", "first, s", "cold, s", "warm, s", "memory of its own, MB")
COLUMNS = (
    *("context", "rows", "engine", "ms", "ratio"),
    *(f"/ context {BASE_CONTEXT}", "busy, ms", "busy / first, quiet"),
)
BANDWIDTH_COLUMNS = ("engine", "weights of products, MB", "GB/s", "memory, GB/s", "share")


def by_section(
    bundles: list[Bundle], role: str, longest: int, *, together: bool
) -> dict[str, list[Bundle]]:
    """Return the bundles by the target's precision, or all in one section (always for drafts).

    Raises:
        click.UsageError: two folders of a precision have the same name, or a context is too short.
    """
    sections: dict[str, list[Bundle]] = defaultdict(list)
    for bundle in bundles:
        entry = bundle.entry(role)
        if entry.context_length < longest:
            raise click.UsageError(
                f"{bundle.path} has a context of {entry.context_length}, expected {longest} or "
                f"more: make a twin with --context {longest}, or give --context"
            )
        kind = TOGETHER if together else precision_name(entry)
        sections[DRAFTS if role == "draft" else kind].append(bundle)
    for kind, same in sections.items():
        names = [bundle.path.name for bundle in same]
        if len(set(names)) != len(names):
            raise click.UsageError(
                f"the {kind} bundles are {', '.join(names)}; they need different folder names"
            )
    return sections


@click.command(help=__doc__)
@BUNDLES
@click.option("--role", type=click.Choice(ROLES), default="target", show_default=True)
@click.option("--setting", "settings", multiple=True, type=click.Choice(list(SETTINGS)))
@click.option("--together", is_flag=True, help="All precisions in one section.")
@click.option("--rows", "row_counts", multiple=True, type=int, help="[1, 4, 12, 20; drafts 1 to 8]")
@click.option("--context", "contexts", multiple=True, type=int, default=CONTEXTS, show_default=True)
@click.option(
    "--no-busy", "with_busy", flag_value=False, default=True, help="Skip the busy machine."
)
@click.option("--rounds", default=4, show_default=True)
@click.option("--openings", default=3, show_default=True, help="Openings of each kind; 0: none.")
@click.option(
    "--section", default="calls", show_default=True, help="First part of a section's name."
)
@writes(RESULTS / "calls.md")
def main(
    bundles: tuple[Path, ...],
    role: str,
    settings: tuple[str, ...],
    together: bool,
    row_counts: tuple[int, ...],
    contexts: tuple[int, ...],
    with_busy: bool,
    rounds: int,
    openings: int,
    section: str,
    page: Page,
) -> None:
    """Measure every precision and write its section."""
    ort.set_default_logger_severity(3)  # a setting that replaces the runtime's is a warning
    opened = by_section(
        [open_bundle(path) for path in bundles], role, max(contexts), together=together
    )
    page.begin(*(f"{section}, {kind}" for kind in opened))
    for kind, same in opened.items():
        engines = [
            Engine(bundle, role, setting, page.threads, row_counts or ROWS_OF[role])
            for bundle in same
            for setting in settings or ("today",)
        ]
        timings = measured(engines, contexts, rounds, with_busy=with_busy)
        lines = table(COLUMNS, call_rows(engines, contexts, timings))
        bandwidths = bandwidth_rows(engines, min(contexts), timings, page.threads)
        lines += ["", *table(BANDWIDTH_COLUMNS, bandwidths)]
        if openings:
            lines += ["", *table(OPENING_COLUMNS, opening_rows(same, page.threads, openings))]
        details = f"medians with quartiles over {rounds} rounds of {CALLS_A_ROUND} calls"
        page.write(f"{section}, {kind}", lines, f"onnxruntime {ort.__version__}", details)
