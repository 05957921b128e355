"""Requests at a time: tokens per second of one bundle with each loop.

``python`` and ``native`` are the loops of a Python process; ``library`` is the native library,
which runs without Python's engines: its functions are called here from threads.
"""

import argparse
import ctypes
import importlib.util
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


def rows_of(
    open_with: Callable[[str], Generate], loops: list[str], at_a_time: list[int], num_new: int
) -> Iterator[Row]:
    """Yield a row for every run and loop; of a loop that cannot be opened, with the reason."""
    opened: dict[str, Generate | str] = {}
    for loop in loops:
        try:
            opened[loop] = open_with(loop)
        except (DsbdError, OSError, RuntimeError, click.ClickException) as error:
            opened[loop] = f"missing: {error}"
    for name, options in RUNS.items():
        for loop, generate in opened.items():
            if isinstance(generate, str):
                yield name, loop, generate, *["-"] * (len(at_a_time) - 1)
                continue
            of_run = partial(generate, **options, top_k=20)
            speeds = (tokens_per_second(of_run, number, num_new) for number in at_a_time)
            yield name, loop, *(f"{speed:.0f}" for speed in speeds)


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
    """Measure a bundle; write the rows to ``--json`` after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--provider", required=True)
    parser.add_argument("--loop", action="append", required=True, dest="loops")
    parser.add_argument("--library", type=Path, help="libdsbd_native.so, for --loop library")
    parser.add_argument("--at-a-time", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    rows: list[Row] = []
    with ExitStack() as stack:
        how = (options.bundle, options.provider, options.library, max(options.at_a_time))
        open_with = partial(_opened, stack, *how)
        for row in rows_of(open_with, options.loops, options.at_a_time, options.max_new_tokens):
            print(*row, flush=True)
            rows.append(row)
            write_json(options.json, {"provider": options.provider, "rows": rows})


if __name__ == "__main__":
    main()
