"""Host time of the native library beside Python's, per iteration, on a bundle.

Everything outside ONNX Runtime's calls: masks, binding, laws, selection, pruning. PROGRAM is the
command ``dsbd_native`` of a build; both get the same requests, one at a time, and must give the
same tokens. Start-up is the CPU time of a whole process that answers 4 tokens:

\b
cmake -S native -B build/native && cmake --build build/native
lab/run native-host BUNDLE build/native/dsbd_native
"""  # noqa: D301

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from dsbd_ort import Pipeline
from dsbd_ort.benchmark.bootstrap import spread
from lab.frame.page import BUNDLE, RESULTS, Page, ratio_cell, writes
from scripts.document_sections import table

PROMPT = list(range(3, 67))
RUNS: dict[str, dict[str, Any]] = {
    "sample": {"strategy": "sample"},
    "beam-sample, W=4": {"strategy": "beam-sample", "num_beams": 4},
    "beam-sample, W=32": {"strategy": "beam-sample", "num_beams": 32},
    "dsbd, W=4, 2 layers of 6": {
        **{"strategy": "dsbd", "num_beams": 4, "draft_policy": "fixed"},
        **{"draft_length": 2, "draft_beams": 6},
    },
    "dsbd, W=4, throughput": {"strategy": "dsbd", "num_beams": 4},
}
COLUMNS = ("run", "native, us", "Python, us", "Python / native")


def asked(options: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the options of a request."""
    return {**options, "seed": seed, "max_new_tokens": 64, "top_k": 50, "eos_token_id": []}


def native_answers(program: Path, bundle: Path, threads: int, rounds: int) -> list[Any]:
    """Return the answers of the program to all requests, in their order."""
    lines = [
        json.dumps({"ids": PROMPT, **asked(options, seed)})
        for options in RUNS.values()
        for seed in range(rounds)
    ]
    command = (program, bundle, "--input", "-", "--json", "--threads", str(threads))
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


def cost_of(*command: str | Path) -> str:
    """Return the CPU seconds of a process."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise click.ClickException(f"{command[0]} failed")
    return f"{used.ru_utime + used.ru_stime:.2f} CPU seconds"


@click.command(help=inspect.getdoc(inspect.getmodule(asked)))
@BUNDLE
@click.argument("program", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--rounds", default=16, show_default=True, help="Requests of each run.")
@writes(RESULTS / "host_time.md")
def main(page: Page, bundle: Path, program: Path, rounds: int) -> None:
    """Measure a bundle, and put the table into the section "native" of the page."""
    page.begin("native")
    answers = iter(native_answers(program, bundle, page.threads, rounds))
    rows = []
    with Pipeline.from_bundle(bundle, num_threads=page.threads, prefix_cache=False) as pipeline:
        for name, options in RUNS.items():
            native, python = list[float](), list[float]()
            for seed in range(rounds):
                answer, ours = next(answers), pipeline.generate(PROMPT, **asked(options, seed))
                tokens = [each["token_ids"] for each in answer["sequences"]]
                if tokens != [each.token_ids for each in ours.sequences]:
                    raise click.ClickException(f"{name}, seed {seed}: the tokens are others")
                theirs = answer["stats"]
                native.append(1e6 * theirs["host_s"] / theirs["num_iterations"])
                python.append(1e6 * ours.stats.host_s / ours.stats.num_iterations)
            ratios = [two / one for one, two in zip(native, python, strict=True)]
            cells = (f"{sorted(each)[len(each) // 2]:.0f}" for each in (native, python))
            rows.append((name, *cells, ratio_cell(spread(ratios))))
    ids = "--ids", "3,4,5", "--max-new-tokens", "4"
    one = cost_of(program, bundle, *ids)
    run = "-c", "from dsbd_ort.cli import run; run()"
    text = "--prompt", "def", "--max-new-tokens", "4"
    other = cost_of(sys.executable, *run, bundle, *text)
    starts = f"A process with 4 tokens: native {one}; dsbd-run {other}."
    page.write("native", [*table(COLUMNS, rows), "", starts], bundle.name)


if __name__ == "__main__":
    main()
