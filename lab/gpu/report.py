"""Write the tables and the JSON of a work folder; if a GPU was measured, also the document."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.gpu import choices
from lab.gpu.pieces import (
    BENCH_PREFIX,
    BITS_PREFIX,
    FAMILIES,
    FORWARDS_PREFIX,
    PARITY_PREFIX,
    TABLES_NAME,
)
from lab.gpu.runner import DONE, Result, ResultFolder
from lab.gpu.settings import FAMILY_LIMITS, WEBGPU
from scripts.document_sections import table, write_section

SECTION = "gpu"
JSON_NAME = "gpu.json"
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
FORWARD_COLUMNS = ("bundle", "setting", *choices.COLUMNS[3:-1])
FAMILY_COLUMNS = (
    "dtype", "models", "largest difference of a logit", "beyond the limit", "no result"
)  # fmt: skip
Row = tuple[str, ...]


def main(work: Path, document: Path) -> None:
    """Write WORK/tables.txt, WORK/gpu.json and, unless only a CPU was used, the document."""
    results = ResultFolder(work / "results").all()
    with (work / TABLES_NAME).open("w", encoding="utf-8") as file:
        console = Console(file=file, width=_WIDTH)
        if results:
            console.print(_machine_line(results), highlight=False, markup=False, soft_wrap=True)
        chosen = compared_choices(results)
        for title, columns, rows in (
            ("compared with the CPU", PARITY_COLUMNS, parity_rows(results)),
            ("families", FAMILY_COLUMNS, family_rows(results)),
            ("ways to compute a path", BITS_COLUMNS, bits_rows(results)),
            ("measured", BENCH_COLUMNS, bench_rows(results)),
            ("forwards, ms", FORWARD_COLUMNS, forward_rows(results)),
            ("settings side by side, ms", choices.COLUMNS, choices.rows(chosen)),
        ):
            if rows:
                console.print(_rich(title, columns, rows))
        for line in (*not_done(results), *choices.lines_to_take(chosen)):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    contents = [dataclasses.asdict(result) for result in results]
    (work / JSON_NAME).write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    if measured_on_gpu(results):
        write_section(document, SECTION, section_of(results))


def measured_on_gpu(results: Sequence[Result]) -> bool:
    """Return whether a benchmark or forwards were measured on an NVIDIA GPU."""
    return any(
        r.state == DONE
        and r.piece.startswith((BENCH_PREFIX, FORWARDS_PREFIX))
        and r.values["provider"] not in ("cpu", WEBGPU)
        for r in results
    )


def section_of(results: Sequence[Result]) -> str:
    """Return the tables as Markdown, with the machine and the date."""
    chosen = compared_choices(results)
    return "\n\n".join(
        [
            _machine_line(results),
            "Compared with the CPU provider, same bundle and seeds. A gap is the difference of the "
            "scores that decided differently; TV is the total variation of next-token "
            "distributions along one path.",
            "\n".join(table(PARITY_COLUMNS, parity_rows(results))),
            "A tiny random model of every family, and a Llama with every option: logits of a path "
            "computed in random ways, compared with the CPU's.",
            "\n".join(table(FAMILY_COLUMNS, family_rows(results))),
            "Ways to compute a path whose logits differ in a bit, and the share of the numbers "
            "that do ([what follows](../../docs/gpu.md#bit-for-bit-on-a-gpu)).",
            "\n".join(table(BITS_COLUMNS, bits_rows(results))),
            "Speed over beam sampling of the same distribution in one process "
            "(docs/performance.md). Bundles with -no-graphs replay no CUDA graphs, those with "
            "-tensorrt run its engines.",
            "\n".join(table(BENCH_COLUMNS, bench_rows(results))),
            "Settings side by side: milliseconds of the target's forwards after up to 1,000 "
            "cached rows, and the ratio of the second setting to the first, over the forwards of "
            "1, 8 and 36 rows or the one that is shown.",
            "\n".join(table(choices.COLUMNS, choices.rows(chosen))),
            *not_done(results),
            *choices.lines_to_take(chosen),
        ]
    )


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


def _rich(title: str, columns: Sequence[str], rows: Sequence[Row]) -> Table:
    printed = Table(title=title)
    for index, column in enumerate(columns):
        printed.add_column(column, no_wrap=index < 2, justify="left" if index < 2 else "right")
    for row in rows:
        printed.add_row(*row)
    return printed


def bench_rows(results: Sequence[Result]) -> list[Row]:
    """Return a row for every run of every finished benchmark."""
    rows = []
    for result in _done(results, BENCH_PREFIX):
        runs = {run["name"]: run for run in result.values["runs"]}
        for run in runs.values():
            rows.append(_bench_row(result.piece.removeprefix(BENCH_PREFIX), run, runs))
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
    cases = [case for result in _done(results, FAMILIES) for case in result.values["cases"]]
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


def forward_rows(results: Sequence[Result]) -> list[Row]:
    """Return a row for every setting of every bundle whose forwards were timed."""
    return [
        (
            result.piece.removeprefix(FORWARDS_PREFIX),
            setting,
            *(f"{times[name]:.3f}" if name in times else NOTHING for name in FORWARD_COLUMNS[2:]),
        )
        for result in _done(results, FORWARDS_PREFIX)
        for setting, times in result.values["milliseconds"].items()
    ]


def compared_choices(results: Sequence[Result]) -> list[choices.Compared]:
    """Return the choices between settings that the measured forwards can compare."""
    done = _done(results, FORWARDS_PREFIX)
    return choices.compared(
        {r.piece.removeprefix(FORWARDS_PREFIX): r.values["milliseconds"] for r in done}
    )


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
