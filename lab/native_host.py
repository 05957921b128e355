"""The native library and Python on a bundle: host time, speed, several requests, start and size.

Host time is all time outside ONNX Runtime's calls: masks, binding, distributions, selection,
pruning. Both get the same requests in turn, in one process, and must return the same tokens. The C
library, which embeds Python, is not measured: its times are Python's. PROGRAM is the command
``dsbd_native`` of a build, with the library next to it. Start-up and memory are measured on a whole
process that generates 4 tokens:

\b
cmake -S native -B build/native && cmake --build build/native
lab/run native-host BUNDLE build/native/dsbd_native
"""  # noqa: D301

import ctypes
import inspect
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from dsbd_ort import Pipeline
from dsbd_ort.benchmark.bootstrap import spread
from dsbd_ort.engine.limits import ServiceLimits
from dsbd_ort.engine.service import Service
from lab.frame.page import BUNDLE, RESULTS, ROOT, Page, ratio_cell, spread_cell, writes
from scripts.document_sections import table

PROMPT = list(range(3, 67))
SEVERAL = {"strategy": "dsbd", "num_beams": 4, "max_new_tokens": 32}
AT_A_TIME = 1, 4, 8
TOKENS_BY_WIDTH = {1: 64, 4: 64, 32: 12, 256: 3}
COLUMNS = (
    *("run", "host, native, us", "host, Python, us", "Python / native"),
    *("tokens/s, native", "tokens/s, Python", "native / Python"),
)
SEVERAL_COLUMNS = "requests at a time", "native, a second", "Python, a second", "native / Python"
SIZE_COLUMNS = "a process with 4 tokens", "CPU, s", "resident, MB", "on disk, MB"
PACKAGES = "numpy", "click", "rich", "tokenizers", "filelock", "jinja2", "huggingface_hub"
ENGINE = "onnxruntime"  # both need its library; the wheel also has the Python binding

WAITER = """
import os, sys
pid = os.fork()
if not pid:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1), os.dup2(quiet, 2), os.execv(sys.argv[1], sys.argv[1:])
_, status, used = os.wait4(pid, 0)
print(status, used.ru_utime + used.ru_stime, used.ru_maxrss)
"""
Generate = Callable[..., Any]


def runs() -> dict[str, dict[str, Any]]:
    """Return the options of the runs by name."""
    options_by_run: dict[str, dict[str, Any]] = {
        "greedy": {"strategy": "greedy", "num_beams": 1},
        "sample": {"strategy": "sample", "num_beams": 1},
        "speculative": {"strategy": "speculative", "num_beams": 1},
        "dsbd, W=4, 2 layers of 6": {
            **{"strategy": "dsbd", "num_beams": 4, "draft_policy": "fixed"},
            **{"draft_length": 2, "draft_beams": 6},
        },
    }
    for width in (4, 32, 256):
        for strategy in ("beam-search", "beam-sample", "dsbd"):
            options_by_run[f"{strategy}, W={width}"] = {"strategy": strategy, "num_beams": width}
    for options in options_by_run.values():
        options |= {"max_new_tokens": TOKENS_BY_WIDTH[options["num_beams"]], "eos_token_id": []}
        if options["strategy"] not in ("greedy", "beam-search"):
            options |= {"top_k": 50}
        if options["num_beams"] == 1:
            del options["num_beams"]
    return options_by_run


class Request(ctypes.Structure):
    """The struct dsbd_request of dsbd_native.h."""

    _fields_ = (
        *(("prompt", ctypes.c_char_p), ("prompt_ids", ctypes.POINTER(ctypes.c_int64))),
        *(("num_prompt_ids", ctypes.c_size_t), ("messages", ctypes.c_char_p)),
        *(("options", ctypes.c_char_p), ("on_step", ctypes.c_void_p)),
        ("on_step_context", ctypes.c_void_p),
    )


class Native:
    """The native library with an open bundle."""

    def __init__(self, library: Path, bundle: Path, **settings: Any) -> None:
        self._library, self._pipeline = ctypes.CDLL(str(library)), ctypes.c_void_p()
        self._library.dsbd_last_error.restype = ctypes.c_char_p
        given = str(bundle).encode(), json.dumps(settings).encode()
        self._check(self._library.dsbd_open(*given, ctypes.byref(self._pipeline)))

    def _check(self, status: int) -> None:
        if status:
            raise click.ClickException(self._library.dsbd_last_error().decode())

    def generate(self, prompt: list[int], **options: Any) -> Any:
        ids, text = (ctypes.c_int64 * len(prompt))(*prompt), ctypes.c_char_p()
        request = Request(prompt_ids=ids, num_prompt_ids=len(ids))
        request.options = json.dumps(options).encode()
        given = self._pipeline, ctypes.byref(request), ctypes.byref(text)
        self._check(self._library.dsbd_generate(*given))
        assert text.value is not None
        answer = json.loads(text.value, object_hook=lambda entries: SimpleNamespace(**entries))
        self._library.dsbd_free(text)
        return answer

    def close(self) -> None:
        self._check(self._library.dsbd_close(self._pipeline))


def measured_runs(native: Generate, python: Generate, rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each run's row."""
    for name, options in runs().items():
        number = max(
            min(rounds, 2), rounds * options["max_new_tokens"] // max(TOKENS_BY_WIDTH.values())
        )
        hosts, rates = ([], []), ([], [])  # type: tuple[list[float], ...], tuple[list[float], ...]
        for seed in range(number):
            tokens = list[list[list[int]]]()
            for index in (seed % 2, 1 - seed % 2):
                began = time.perf_counter()
                answer = (native, python)[index](PROMPT, **options, seed=seed)
                rates[index].append(options["max_new_tokens"] / (time.perf_counter() - began))
                stats = answer.stats
                hosts[index].append(1e6 * stats.host_s / stats.num_iterations)
                tokens.append([each.token_ids for each in answer.sequences])
            if tokens[0] != tokens[1]:
                raise click.ClickException(f"{name}, seed {seed}: the tokens are others")
        cells = [f"{spread(each).median:.0f}" for each in hosts]
        cells += [ratio_cell(spread([b / a for a, b in zip(*hosts, strict=True)]))]
        cells += [spread_cell(spread(each)) for each in rates]
        yield name, *cells, ratio_cell(spread([a / b for a, b in zip(*rates, strict=True)]))


def measured_several(native: Generate, python: Generate, rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield the cells of a row for each number of requests at a time."""
    for number in AT_A_TIME:
        rates = ([], [])  # type: tuple[list[float], ...]
        with ThreadPoolExecutor(number) as callers:
            for turn in range(max(1, rounds // 2)):
                for index in (turn % 2, 1 - turn % 2):
                    began, answer = time.perf_counter(), (native, python)[index]
                    seeds = range(max(AT_A_TIME))
                    list(callers.map(lambda seed, a=answer: a(PROMPT, **SEVERAL, seed=seed), seeds))
                    rates[index].append(len(seeds) / (time.perf_counter() - began))
        cells = (spread_cell(spread(each)) for each in rates)
        ratios = [a / b for a, b in zip(*rates, strict=True)]
        yield str(number), *cells, ratio_cell(spread(ratios))


def process_cells(*command: str | Path) -> tuple[str, str]:
    """Return the cells of a process: CPU seconds and peak resident memory (MB)."""
    # A forked process begins with its parent's memory, so the parent must be small.
    waiter = [sys.executable, "-S", "-c", WAITER, *command]
    status, seconds, kibibytes = subprocess.check_output(waiter, text=True).split()
    if int(status):
        raise click.ClickException(f"{command[0]} failed")
    return f"{float(seconds):.2f}", f"{int(kibibytes) / 1024:.0f}"


def files_of(package: str) -> Iterator[Path]:
    """Yield the files of an installed package."""
    yield from (Path(str(file.locate())) for file in distribution(package).files or ())


def megabytes(files: Iterable[Path]) -> float:
    """Return the total size of ``files`` in MB; folders are skipped."""
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def size_rows(library: Path, program: Path, bundle: Path) -> Iterator[tuple[str, ...]]:
    """Yield the rows of native and Python; sizes are stripped, without ONNX Runtime's library."""
    with tempfile.TemporaryDirectory() as folder:
        for file in (library, program):
            subprocess.run(["strip", "-o", Path(folder, file.name), file], check=True)
        size = f"{megabytes(Path(folder).iterdir()):.1f}"
    limit = "--max-new-tokens", "4"
    yield "native", *process_cells(program, bundle, "--ids", "3,4,5", *limit), size
    files = (file for name in PACKAGES for file in files_of(name))
    sources = (file for name in ("dsbd_ort", "runtime") for file in (ROOT / name).rglob("*.py"))
    run = "-c", "from dsbd_ort.cli import run; run()"
    cells = process_cells(sys.executable, *run, bundle, "--prompt", "def", *limit)
    yield "Python, without the interpreter", *cells, f"{megabytes(files) + megabytes(sources):.1f}"
    libraries = (file for file in files_of(ENGINE) if file.name.startswith("libonnxruntime.so"))
    yield "ONNX Runtime's library, for both", "", "", f"{megabytes(libraries):.1f}"


@click.command(help=inspect.getdoc(inspect.getmodule(runs)))
@BUNDLE
@click.argument("program", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--rounds", default=4, show_default=True, help="Requests per run; fewer if wide.")
@writes(RESULTS / "host_time.md")
def main(page: Page, bundle: Path, program: Path, rounds: int) -> None:
    """Measure a bundle and write the tables into the section "native" of the page."""
    page.begin("native")
    library = program.parent / "libdsbd_native.so"
    settings: dict[str, Any] = {"num_threads": page.threads, "prefix_cache": False}
    native = Native(library, bundle, max_requests=max(AT_A_TIME), **settings)
    with Pipeline.from_bundle(bundle, **settings) as pipeline:
        of_runs = [*measured_runs(native.generate, pipeline.generate, rounds)]
        limits = ServiceLimits(max_requests=max(AT_A_TIME))
        with Service(pipeline, limits) as service:
            of_several = [*measured_several(native.generate, service.generate, rounds)]
    native.close()
    sizes = [*size_rows(library, program, bundle)]
    lines = [*table(COLUMNS, of_runs), "", *table(SEVERAL_COLUMNS, of_several), ""]
    lines += [*table(SIZE_COLUMNS, sizes)]
    page.write("native", lines, bundle.name)


if __name__ == "__main__":
    main()
