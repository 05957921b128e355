"""Write the tables of a work folder; if a GPU was measured, also the document."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.gpu.forward_times import NUM_ROWS
from lab.gpu.pieces import (
    BENCH_PREFIX,
    BITS_PREFIX,
    CACHES_PREFIX,
    DRAFT_PREFIX,
    FAMILIES_PREFIX,
    NATIVE_PREFIX,
    PARITY_PREFIX,
    RESULTS_NAME,
    SERVING_PREFIX,
    TABLES_NAME,
    TENSORRT_SUFFIX,
)
from lab.gpu.runner import DONE, Result, ResultFile
from lab.gpu.settings import FAMILY_LIMITS, WEBGPU
from scripts.document_sections import table, write_section

_WIDTH = 180  # columns

NOTHING = "-"
BENCH_COLUMNS = (
    "bundle", "run", "tokens/s", "speed-up", "95 %", "same tokens", "host %", "KV MB", "J/token",
    "J of baseline / J",
)  # fmt: skip
PARITY_COLUMNS = (
    "bundle", "same tokens", "near-ties", "largest gap", "mean TV", "largest TV", "verdict"
)  # fmt: skip
BITS_COLUMNS = (
    "bundle", "the same calls again", "any rows, any places", "fixed rows, any places",
    "fixed rows, fixed places",
)  # fmt: skip
AT_A_TIME_COLUMNS = ("bundle", "run", "loop", "1", "8", "32")
CACHES_COLUMNS = ("bundle", "cached rows", *(f"{n} new" for n in NUM_ROWS))
TIME_COLUMNS = ("piece", "state", "seconds")
FAMILY_COLUMNS = (
    "dtype", "models", "largest difference of a logit", "beyond the limit", "no result"
)  # fmt: skip
Row = tuple[str, ...]


@dataclass(frozen=True)
class _Part:
    """A table of a section of the page, with the text before it."""

    section: str
    text: str
    columns: Row
    rows: list[Row]


SECTIONS = ("gpu hour", "gpu")  # not known before the second run; answered by the first


def _parts(results: Sequence[Result]) -> list[_Part]:
    """Return the tables that have rows."""
    open_section, answered = SECTIONS
    prefixes = (PARITY_PREFIX, BITS_PREFIX, BENCH_PREFIX)
    names = [each.piece for each in results if each.piece.startswith(prefixes)]
    if all(name.endswith(TENSORRT_SUFFIX) for name in names):  # the answered ones keep their page
        answered = open_section
    parts = [
        _Part(
            open_section,
            "Requests at a time: tokens per second after a first round. The loops python and "
            "native run in a Python process, library is the native library.",
            AT_A_TIME_COLUMNS,
            cell_rows(results, SERVING_PREFIX) + cell_rows(results, NATIVE_PREFIX),
        ),
        _Part(
            open_section,
            "Drafts: speed over sampling or beam sampling of the same distribution in one process "
            "(docs/performance.md). The name ends in the draft.",
            BENCH_COLUMNS,
            bench_rows(results, DRAFT_PREFIX),
        ),
        _Part(
            open_section,
            "A tiny random model of every family, and a Llama with every option: logits of a path "
            "computed in random ways, compared with the CPU's.",
            FAMILY_COLUMNS,
            family_rows(results),
        ),
        _Part(
            open_section,
            "Milliseconds of the target's forwards by rows in the cache.",
            CACHES_COLUMNS,
            cell_rows(results, CACHES_PREFIX),
        ),
        _Part(
            answered,
            "Compared with the CPU provider, same bundle and seeds. A gap is the difference of the "
            "scores that decided differently; TV is the total variation of next-token "
            "distributions along one path.",
            PARITY_COLUMNS,
            parity_rows(results),
        ),
        _Part(
            answered,
            "Ways to compute a path whose logits differ in a bit, and the share of the numbers "
            "that do ([what follows](../../docs/gpu.md#bit-for-bit-on-a-gpu)).",
            BITS_COLUMNS,
            bits_rows(results),
        ),
        _Part(
            answered,
            "Speed over beam sampling of the same distribution in one process "
            "(docs/performance.md). Bundles with -tensorrt run its engines.",
            BENCH_COLUMNS,
            bench_rows(results, BENCH_PREFIX),
        ),
    ]
    return [part for part in parts if part.rows]


def main(work: Path, document: Path) -> None:
    """Write WORK/tables.txt and, if an NVIDIA GPU was measured, the sections of the document."""
    results = ResultFile(work / RESULTS_NAME).all()
    parts = _parts(results)
    with (work / TABLES_NAME).open("w", encoding="utf-8") as file:
        console = Console(file=file, width=_WIDTH)
        if results:
            console.print(_machine_line(results), highlight=False, markup=False, soft_wrap=True)
        for part in parts:
            console.print(_rich(part))
        console.print(_rich(_Part("", "Seconds of each piece.", TIME_COLUMNS, time_rows(results))))
        for line in not_done(results):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if measured_on_gpu(results):
        for section in dict.fromkeys(part.section for part in parts):
            write_section(document, section, section_of(results, section))


def measured_on_gpu(results: Sequence[Result]) -> bool:
    """Return whether anything was measured on an NVIDIA GPU."""
    return any(
        result.values.get("provider", WEBGPU) not in ("cpu", WEBGPU) and result.piece != "machine"
        for result in results
    )


def section_of(results: Sequence[Result], section: str) -> str:
    """Return the tables of a section as Markdown, with the machine and the date."""
    texts = [_machine_line(results)]
    for part in _parts(results):
        if part.section == section:
            texts += [part.text, "\n".join(table(part.columns, part.rows))]
    if section == SECTIONS[0]:
        texts += ["Seconds of each piece.", "\n".join(table(TIME_COLUMNS, time_rows(results)))]
        texts += not_done(results)
    return "\n\n".join(texts)


def not_done(results: Sequence[Result]) -> list[str]:
    """Return a line for every piece that failed or did not apply."""
    return [f"{r.piece}: {r.state}, {r.reason}" for r in results if r.state != DONE]


def _machine_line(results: Sequence[Result]) -> str:
    by_piece = {result.piece: result for result in results}
    parts = [f"Measured by `lab/run gpu` on {results[0].began[:10]}"]
    machine = by_piece.get("machine")
    if machine is not None and machine.state == DONE:
        parts += [", ".join(gpu.values()) for gpu in machine.values["gpus"]]
        versions = machine.values["versions"].items()
        parts.append(", ".join(f"{name} {version}" for name, version in versions))
    return "; ".join(parts) + "."


def _rich(part: _Part) -> Table:
    printed = Table(title=part.text.partition(":")[0].partition(".")[0])
    for index, column in enumerate(part.columns):
        printed.add_column(column, no_wrap=index < 2, justify="left" if index < 2 else "right")
    for row in part.rows:
        printed.add_row(*row)
    return printed


def cell_rows(results: Sequence[Result], prefix: str) -> list[Row]:
    """Return the rows of pieces that write cells, also of pieces that were stopped."""
    return [
        (result.piece.removeprefix(prefix), *cells)
        for result in results
        if result.piece.startswith(prefix)
        for cells in result.values.get("rows", ())
    ]


def time_rows(results: Sequence[Result]) -> list[Row]:
    """Return a row for every piece: its state, and the seconds that it took."""
    return [(result.piece, result.state, f"{result.seconds:.1f}") for result in results]


def bench_rows(results: Sequence[Result], prefix: str) -> list[Row]:
    """Return a row for every run of every finished benchmark."""
    rows = []
    for result in _done(results, prefix):
        runs = {run["name"]: run for run in result.values["runs"]}
        for run in runs.values():
            rows.append(_bench_row(result.piece.removeprefix(prefix), run, runs))
    return rows


def parity_rows(results: Sequence[Result]) -> list[Row]:
    """Return a row for every finished comparison with the CPU."""
    rows = []
    for result in _done(results, PARITY_PREFIX):
        values = result.values
        gaps = ["beyond top-k" if gap is None else f"{gap:.1e}" for gap in _largest(values["gaps"])]
        rows.append(
            (
                result.piece.removeprefix(PARITY_PREFIX),
                f"{values['num_identical']}/{values['num_compared']}",
                f"{values['num_near_ties']}/{len(values['gaps'])} "
                f"(gap up to {values['gap_limit']:g})",
                *(gaps or [NOTHING]),
                f"{values['mean_variation']:.1e}",
                f"{values['max_variation']:.1e} (limit {values['variation_limit']:g})",
                "within limits" if values["is_within_limits"] else "beyond limits",
            )
        )
    return rows


def family_rows(results: Sequence[Result]) -> list[Row]:
    """Return a row for every dtype in which the families were tested."""
    cases = [
        case
        for result in results
        if result.piece.startswith(FAMILIES_PREFIX)
        for case in result.values.get("cases", ())
    ]
    rows: list[Row] = []
    for dtype, limit in FAMILY_LIMITS.items():
        of_dtype = [case for case in cases if case["dtype"] == dtype]
        done = [case for case in of_dtype if case["difference"] is not None]
        if of_dtype:
            largest = max(done, key=lambda case: case["difference"], default=None)
            beyond = [case["case"] for case in done if not case["difference"] <= limit]
            reasons = [f"{case['case']}: {case['reason']}" for case in of_dtype if case not in done]
            shown = (
                NOTHING if largest is None else f"{largest['difference']:.1e} ({largest['case']})"
            )
            rows.append((dtype, str(len(of_dtype)), shown, _lines(beyond), _lines(reasons)))
    return rows


def _lines(texts: Sequence[str]) -> str:
    return "; ".join(texts) or NOTHING


def bits_rows(results: Sequence[Result]) -> list[Row]:
    """Return a row for every bundle whose differing bits were counted."""
    return [
        (
            result.piece.removeprefix(BITS_PREFIX),
            *(_bits_cell(result.values["counts"][kind]) for kind in BITS_COLUMNS[1:]),
        )
        for result in _done(results, BITS_PREFIX)
    ]


def _bits_cell(count: dict[str, int]) -> str:
    share = count["num_other_logits"] / count["num_logits"]
    return f"{count['num_other_ways']}/{count['num_ways']} ({share:.1e})"


def _done(results: Sequence[Result], prefix: str) -> list[Result]:
    return [r for r in results if r.state == DONE and r.piece.startswith(prefix)]


def _largest(gaps: Sequence[float | None]) -> list[float | None]:
    """Return a list of the largest gap, where None counts as infinite; [] without gaps."""
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
