"""Write the tables and the JSON of a work folder, and the document once a GPU was measured."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from document_section import write_section
from gpu_check.pieces import BENCH_PREFIX, TABLES_NAME
from gpu_check.results import DONE, Result, ResultFolder
from gpu_check.table_rows import BENCH_COLUMNS, PARITY_COLUMNS, Row, bench_rows, parity_rows

SECTION = "gpu"
JSON_NAME = "gpu.json"
_WIDTH = 180  # columns


def main(work: Path, document: Path) -> None:
    """Write WORK/tables.txt, WORK/gpu.json and, unless only a CPU was used, the document."""
    results = ResultFolder(work / "results").all()
    with (work / TABLES_NAME).open("w", encoding="utf-8") as file:
        console = Console(file=file, width=_WIDTH)
        console.print(_rich("compared with the CPU", PARITY_COLUMNS, parity_rows(results)))
        console.print(_rich("measured", BENCH_COLUMNS, bench_rows(results)))
        for line in not_done(results):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    found = [dataclasses.asdict(result) for result in results]
    (work / JSON_NAME).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if measured_on_gpu(results):
        write_section(document, SECTION, section_of(results))


def measured_on_gpu(results: Sequence[Result]) -> bool:
    """Tell whether a benchmark was done on anything but the CPU."""
    return any(
        r.state == DONE and r.piece.startswith(BENCH_PREFIX) and r.values["provider"] != "cpu"
        for r in results
    )


def section_of(results: Sequence[Result]) -> str:
    """Return the tables as Markdown, with what they were measured on and when."""
    return "\n\n".join(
        [
            _machine_line(results),
            "Compared with the CPU provider, same bundle and seeds. A gap is the difference of the "
            "scores that decided otherwise; TV is the total variation of next-token laws along one "
            "path.",
            _markdown(PARITY_COLUMNS, parity_rows(results)),
            "Speed beside beam sampling of the same law in one process (docs/benchmark.md). "
            "Bundles with -graphs replay CUDA graphs, those with -tensorrt run its engines.",
            _markdown(BENCH_COLUMNS, bench_rows(results)),
            *not_done(results),
        ]
    )


def not_done(results: Sequence[Result]) -> list[str]:
    """Return a line for every piece that failed or did not apply."""
    return [f"{r.piece}: {r.state}, {r.reason}" for r in results if r.state != DONE]


def _machine_line(results: Sequence[Result]) -> str:
    by_piece = {result.piece: result for result in results}
    parts = [f"Measured by `scripts/check_gpu` on {results[0].began[:10]}"]
    machine = by_piece.get("machine")
    if machine is not None and machine.state == DONE:
        parts += [", ".join(gpu.values()) for gpu in machine.values["gpus"]]
        versions = machine.values["versions"].items()
        parts.append(", ".join(f"{name} {version}" for name, version in versions))
    return "; ".join(parts) + "."


def _rich(title: str, columns: Sequence[str], rows: Sequence[Row]) -> Table:
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index < 2, justify="left" if index < 2 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _markdown(columns: Sequence[str], rows: Sequence[Row]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
