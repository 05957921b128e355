"""dsbd-bench: strategies side by side in one process, as a table, JSON and plots."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import track

from dsbd_ort.benchmark.bench_run import BenchRun, with_baselines
from dsbd_ort.benchmark.default_runs import DEFAULT_STRATEGIES, CommonSettings, runs_of
from dsbd_ort.benchmark.energy import energy_meter
from dsbd_ort.benchmark.errors import BenchmarkError
from dsbd_ort.benchmark.machine import this_machine, versions
from dsbd_ort.benchmark.measure import measure, warm_up
from dsbd_ort.benchmark.prompts import PROMPTS, read_prompts
from dsbd_ort.benchmark.report import SCHEMA_VERSION, BenchReport, BundleInfo, EngineInfo
from dsbd_ort.benchmark.summary import RunSummary, summarize
from dsbd_ort.commands.bench_runs import run_from_text
from dsbd_ort.commands.bench_table import VALUE_COLUMNS, WORK_COLUMNS, bench_table
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.version import __version__
from dsbd_runtime.bundle import MANIFEST_NAME, Bundle

FILE_WIDTH = 160  # columns of the tables where no terminal sets them


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What the command line asked for.

    Attributes:
        bundle: folder of the bundle.
        strategies: to run under the common settings; with neither these nor runs, a default list.
        runs: the texts of ``--run``.
        common: settings for every run that does not name its own.
        prompts: file with prompts, None for the built-in ones.
        repetitions, seed: see ``measure``.
        provider, draft_provider, num_threads, cuda_graphs: see Pipeline.from_bundle.
        json_file, plot_file: what else to write.
    """

    bundle: Path
    strategies: Sequence[str]
    runs: Sequence[str]
    common: CommonSettings
    prompts: Path | None
    repetitions: int
    seed: int
    provider: str
    draft_provider: str | None
    num_threads: int | None
    cuda_graphs: bool
    json_file: Path | None
    plot_file: Path | None


def run(request: BenchRequest) -> None:
    """Measure and print: the table to stdout, progress to stderr."""
    runs = with_baselines(_runs(request))
    prompts = list(PROMPTS) if request.prompts is None else read_prompts(request.prompts)
    plot = _plotter(request.plot_file)
    for file in (request.json_file, request.plot_file):
        if file is not None and not file.parent.is_dir():
            raise BenchmarkError(f"{file} cannot be written: no folder {file.parent}; make it")
    report = _measured(request, runs, prompts)
    title = _title(report)
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    console.print(bench_table(report.runs, title, VALUE_COLUMNS))
    console.print(bench_table(report.runs, title, WORK_COLUMNS))
    try:
        if request.json_file is not None:
            request.json_file.write_text(report.to_json(), encoding="utf-8")
        if plot is not None:
            plot(report.runs, title)
    except OSError as error:
        files = " or ".join(str(f) for f in (request.json_file, request.plot_file) if f)
        raise BenchmarkError(f"{files} cannot be written: {error.strerror or error}") from error


def _plotter(file: Path | None) -> Callable[[Sequence[RunSummary], str], None] | None:
    """Return what writes the plots to ``file``, known to work before hours of measuring."""
    if file is None:
        return None
    try:  # here, not at the top: matplotlib is an extra
        from dsbd_ort.benchmark.plots import check_picture, plot
    except ImportError as error:
        raise BenchmarkError(
            f"--plot needs a package that is not installed ({error.name}); "
            "run: pip install 'dsbd-ort[bench]'"
        ) from error
    check_picture(file)
    return lambda runs, title: plot(runs, title, file)


def _title(report: BenchReport) -> str:
    engine = report.bundle.target
    precision = engine.dtype if engine.quantization == "none" else engine.quantization
    threads = "default" if report.threads is None else report.threads
    return (
        f"{Path(report.bundle.path).name}, {precision}, {report.provider}, threads: {threads}, "
        f"{len(report.prompts)} prompts x {report.repetitions} repetitions"
    )


def _runs(request: BenchRequest) -> list[BenchRun]:
    strategies = request.strategies or (() if request.runs else DEFAULT_STRATEGIES)
    texts = [run_from_text(text, request.common) for text in request.runs]
    return [*runs_of(strategies, request.common), *texts]


def _measured(request: BenchRequest, runs: list[BenchRun], prompts: list[str]) -> BenchReport:
    machine, created = this_machine(), datetime.now(UTC).isoformat(timespec="seconds")
    energy = energy_meter([request.provider, request.draft_provider or request.provider])
    stderr = Console(stderr=True)
    with Pipeline.from_bundle(
        request.bundle,
        provider=request.provider,
        draft_provider=request.draft_provider,
        num_threads=request.num_threads,
        cuda_graphs=request.cuda_graphs,
        prefix_cache=False,  # all runs continue one prompt in turn: only the first would pay for it
    ) as pipeline:
        stderr.print(f"warming up {len(runs)} runs", highlight=False)
        warm_up(pipeline, runs, prompts)
        requests = measure(
            pipeline,
            runs,
            prompts,
            repetitions=request.repetitions,
            seed=request.seed,
            clock=time.perf_counter,
            energy=energy,
        )
        total = request.repetitions * len(prompts) * len(runs)
        measurements = list(track(requests, "measuring", total=total, console=stderr))
        bundle = _bundle_info(request.bundle, pipeline.bundle)
    return BenchReport(
        schema_version=SCHEMA_VERSION,
        created=created,
        bundle=bundle,
        machine=machine,
        versions=versions(__version__),
        provider=request.provider,
        draft_provider=request.draft_provider or request.provider,
        threads=request.num_threads,
        cuda_graphs=request.cuda_graphs,
        energy_counters=energy.names,
        repetitions=request.repetitions,
        seed=request.seed,
        prompts=prompts,
        runs=summarize(runs, measurements),
        measurements=measurements,
    )


def _bundle_info(path: Path, bundle: Bundle) -> BundleInfo:
    names = [field.name for field in dataclasses.fields(EngineInfo)]
    engines = {
        role: EngineInfo(**{name: getattr(bundle.entry(role), name) for name in names})
        for role in ("target", "draft")
    }
    digest = hashlib.sha256((path / MANIFEST_NAME).read_bytes()).hexdigest()
    return BundleInfo(path=str(path), manifest_sha256=digest, **engines)
