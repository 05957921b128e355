"""Requests at a time: tokens per second of one bundle with each loop.

``python`` and ``native`` are the loops of a Python process; ``library`` is the native library,
which runs without Python's engines: its functions are called here from threads.
"""

import argparse
import ctypes
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click

from dsbd_errors import DsbdError
from dsbd_ort import Pipeline
from dsbd_ort.decoding.native_decoder import NOT_INSTALLED, is_installed
from dsbd_ort.engine.limits import ServiceLimits
from dsbd_ort.engine.service import Service
from lab.gpu.runner import write_json
from lab.native_host import Native

RUNS: dict[str, dict[str, Any]] = {
    "sample": {"strategy": "sample"},
    "dsbd W=2": {"strategy": "dsbd", "num_beams": 2, "draft_policy": "throughput"},
}
LIBRARY = "library"
PROMPT = list(range(3, 67))
_SECONDS = 2.0  # rounds are repeated for so long
_LONGEST_REASON = 200
Generate = Callable[..., Any]
Row = tuple[str, ...]


def tokens_per_second(generate: Generate, number: int, num_new: int) -> float:
    """Return the speed of ``number`` requests at a time; a first round is not measured."""

    def answer(seed: int) -> None:
        generate([seed % 200 + 3, *PROMPT], seed=seed, max_new_tokens=num_new, eos_token_id=[])

    with ThreadPoolExecutor(number) as callers:
        list(callers.map(answer, range(number)))
        began, num_rounds = time.perf_counter(), 0
        while not num_rounds or time.perf_counter() - began < _SECONDS:
            num_rounds += 1
            list(callers.map(answer, range(number * num_rounds, number * (num_rounds + 1))))
        return number * num_rounds * num_new / (time.perf_counter() - began)


def tables_of(
    open_with: Callable[[str], Generate], loops: list[str], at_a_time: list[int], num_new: int
) -> Iterator[list[Row]]:
    """Yield all rows after each measurement: a row for every run and loop, or why it is missing."""
    opened: dict[str, Generate] = {}
    speeds: dict[tuple[str, str], list[str]] = {}
    for loop in loops:
        try:
            opened[loop] = open_with(loop)
        except (DsbdError, OSError, RuntimeError, click.ClickException) as error:
            reason = " ".join(f"missing: {error}".split())[:_LONGEST_REASON]
            speeds |= {(name, loop): [reason] for name in RUNS}
    for number, name, loop in itertools.product(at_a_time, RUNS, loops):
        if loop in opened:
            of_run = partial(opened[loop], **RUNS[name], top_k=20)
            speed = tokens_per_second(of_run, number, num_new)
            speeds.setdefault((name, loop), []).append(f"{speed:.0f}")
        yield [
            (*names, *cells, *["-"] * (len(at_a_time) - len(cells)))
            for names, cells in sorted(speeds.items(), key=lambda each: each[0][0], reverse=True)
        ]


def _opened(
    stack: ExitStack, bundle: Path, provider: str, library: Path | None, most: int, loop: str
) -> Generate:
    if loop == LIBRARY:
        assert library is not None
        where = {} if provider == "cpu" else {"provider": provider}
        native = Native(_loadable(library), bundle, max_requests=most, **where)
        stack.callback(native.close)
        return native.generate
    if loop == "native" and not is_installed():
        raise RuntimeError(NOT_INSTALLED)
    options: dict[str, Any] = {"provider": provider, "loop": loop}
    pipeline = stack.enter_context(Pipeline.from_bundle(bundle, **options))
    service = stack.enter_context(Service(pipeline, ServiceLimits(max_requests=most)))
    return service.generate


def _loadable(library: Path) -> Path:
    """Return the library after loading the ONNX Runtime of this Python, which it needs."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("no package onnxruntime")
    folder = Path(spec.submodule_search_locations[0], "capi")
    for file in folder.glob("libonnxruntime.so.*"):
        ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
    return library


def main() -> None:
    """Measure a bundle; write the rows to ``--json`` after each measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--provider", required=True)
    parser.add_argument("--loop", action="append", required=True, dest="loops")
    parser.add_argument("--library", type=Path, help="libdsbd_native.so, for --loop library")
    parser.add_argument("--at-a-time", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    with ExitStack() as stack:
        how = (options.bundle, options.provider, options.library, max(options.at_a_time))
        open_with = partial(_opened, stack, *how)
        how_many = (options.loops, options.at_a_time, options.max_new_tokens)
        for rows in tables_of(open_with, *how_many):
            write_json(options.json, {"provider": options.provider, "rows": rows})
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
