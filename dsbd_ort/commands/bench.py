"""dsbd-bench: strategies side by side in one process, as tables, JSON and plots."""

import dataclasses
import hashlib
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, track

from dsbd_ort.benchmark.advice import NUM_STEPS, advise, sentences
from dsbd_ort.benchmark.bench_run import (
    DEFAULT_STRATEGIES,
    PROMPTS,
    BenchmarkError,
    BenchRun,
    CommonSettings,
    measure,
    read_prompts,
    runs_of,
    warm_up,
    with_baselines,
)
from dsbd_ort.benchmark.invariance import check_invariance
from dsbd_ort.benchmark.machine import energy_meter, this_machine, versions
from dsbd_ort.benchmark.report import (
    SCHEMA_VERSION,
    BenchReport,
    BundleInfo,
    EngineInfo,
    RunSummary,
    precision_name,
    summarize,
)
from dsbd_ort.commands.bench_table import (
    VALUE_COLUMNS,
    WORK_COLUMNS,
    bench_table,
    cost_table,
    gain_table,
    invariance_table,
    verdict_line,
)
from dsbd_ort.commands.one_line import packages_of
from dsbd_ort.commands.option_types import COUNT, COUNT_OR_NONE, PATH, OptionText
from dsbd_ort.commands.options import flag, group, option, pipeline_settings
from dsbd_ort.decoding.option_table import IN_PYTHON_ALONE, OPTION_TABLE
from dsbd_ort.output_files import write_whole
from dsbd_ort.pipeline import PipelineSettings
from dsbd_ort.requests.bundle_requests import check_drafter
from dsbd_ort.requests.results import json_text
from dsbd_ort.version import __version__
from dsbd_runtime.bundle_files.bundle import MANIFEST_NAME, Bundle, open_bundle
from dsbd_runtime.engine.providers import parse_placement

FILE_WIDTH = 160  # columns of the tables without a terminal
_COMPARED, _MEASURED, _REPORT = "Strategies", "Measurement", "Report"  # sections of the help
_OWN_KEYS = ("name", "baseline")
_NO_KEYS = ("strategy", "constraint", *IN_PYTHON_ALONE)


@dataclass(frozen=True, kw_only=True)
class BenchArguments:
    """The arguments of dsbd-bench. ``common``: options of runs that do not set these themselves."""

    strategies: tuple[str, ...] = option(
        default="",
        callback=lambda _context, _parameter, text: tuple(
            name.strip() for name in text.split(",") if name.strip()
        ),
        help=f"Names separated by commas; baselines are added [{', '.join(DEFAULT_STRATEGIES)}].",
        section=_COMPARED,
    )
    runs: tuple[str, ...] = option(
        "--run",
        multiple=True,
        metavar="TEXT",
        help="A strategy and its options, 'dsbd num_beams=4 width_policy=fixed', optionally with "
        "name= and baseline=. May be repeated.",
        section=_COMPARED,
    )
    common: CommonSettings = group(
        CommonSettings,
        section="Options of runs that do not set their own",
        num_beams=option(
            type=OptionText("draft_beams"),  # accepts several numbers too
            default="2,4",
            show_default=True,
            callback=lambda _context, _parameter, value: (
                (value,) if isinstance(value, int) else value
            ),
            help="All widths.",
        ),
        draft_length="For strategies that draft.",
        draft_beams=option(
            type=OptionText("draft_beams"), help="For strategies that draft a tree."
        ),
        top_k=option(type=COUNT_OR_NONE, help="For strategies that sample."),
        max_new_tokens="Longest continuation.",
    )
    prompts: Path | None = option(
        type=PATH, help="File, one prompt per line, or *.jsonl [8 of code].", section=_MEASURED
    )
    repetitions: int = option(
        type=COUNT, default=5, show_default=True, help="Runs of every prompt.", section=_MEASURED
    )
    seed: int = option(
        type=click.IntRange(0, 2**128 - 1),
        default=0,
        show_default=True,
        help="Seed of the first prompt; each further prompt adds 1.",
        section=_MEASURED,
    )
    # All runs continue one prompt in turn. With a prefix cache only the first run would compute it;
    # with a pool of texts the later runs could draft from the first one's answer.
    pipeline: PipelineSettings = pipeline_settings(
        verify=False, prefix_cache=False, generation_config=False, ngram_pool=0
    )
    check_invariance: bool = flag(
        help="Instead of measuring, count the requests whose tokens or log-probabilities depend on "
        "how they are computed. An error if the bundle claims to be bit-exact.",
        section=_MEASURED,
    )
    advise: bool = flag(
        help="Measure how long calls of both engines take here and how much each strategy gains "
        "from the draft, and suggest improvements.",
        section=_MEASURED,
    )
    json_file: Path | None = option(
        "--json", type=PATH, help="Write the report to this file.", section=_REPORT
    )
    plot_file: Path | None = option(
        "--plot", type=PATH, help="Write the plots to this file.", section=_REPORT
    )


def run(arguments: BenchArguments) -> None:
    """Measure and print: the table to stdout, progress to stderr."""
    prompts = list(PROMPTS) if arguments.prompts is None else read_prompts(arguments.prompts)
    if arguments.check_invariance:
        count_differing(arguments, prompts)
        return
    if arguments.advise:
        check_alone(arguments)
        give_advice(arguments, prompts)
        return
    runs = with_baselines(_runs(arguments))
    plot = _plotter(arguments.plot_file)
    for file in (arguments.json_file, arguments.plot_file):
        if file is not None and not file.parent.is_dir():
            raise BenchmarkError(f"{file} cannot be written: no folder {file.parent}; make it")
    report = _measured(arguments, runs, prompts)
    threads = "default" if report.threads is None else report.threads
    title = (
        f"{Path(report.bundle.path).name}, {precision_name(report.bundle.target)}, "
        f"{report.provider}, threads: {threads}, "
        f"{len(report.prompts)} prompts x {report.repetitions} repetitions"
    )
    console = _stdout()
    console.print(bench_table(report.runs, title, VALUE_COLUMNS))
    console.print(bench_table(report.runs, title, WORK_COLUMNS))
    if verdict := verdict_line(report.runs):
        console.print(verdict, highlight=False, soft_wrap=True)
    try:
        if arguments.json_file is not None:
            write_whole(arguments.json_file, json_text(dataclasses.asdict(report), indent=1) + "\n")
        if plot is not None:
            plot(report.runs, title)
    except OSError as error:
        files = " or ".join(str(f) for f in (arguments.json_file, arguments.plot_file) if f)
        raise BenchmarkError(f"{files} cannot be written: {error.strerror or error}") from error


def count_differing(arguments: BenchArguments, prompts: list[str]) -> None:
    """Print how many requests differ; raise BenchmarkError if any differ in a bit-exact bundle."""
    settings = arguments.pipeline
    pairs = check_invariance(
        settings,
        prompts,
        arguments.common,
        repetitions=arguments.repetitions,
        seed=arguments.seed,
    )
    counts = list(track(pairs, "comparing", total=None, console=Console(stderr=True)))
    entries = list(open_bundle(settings.bundle).manifest.entry_by_role.values())
    claims = {str(entry.bit_exact or "no") for entry in entries}
    title = f"{settings.bundle.name}, {precision_name(entries[0])}, bit-exact: {', '.join(claims)}"
    _stdout().print(invariance_table(counts, title))
    num_differing = sum(pair.num_other_logprobs for pair in counts)
    if num_differing and entries[0].bit_exact:
        raise BenchmarkError(
            f"{num_differing} requests differ, but {settings.bundle} says bit_exact "
            f"{entries[0].bit_exact!r}; this processor or version of ONNX Runtime has other "
            "kernels than those that were checked: do not rely on equal outputs here"
        )


def check_alone(arguments: BenchArguments) -> None:
    """Raise UsageError for options that --advise would not use."""
    unused = {
        "--strategies": arguments.strategies,
        "--run": arguments.runs,
        "--json": arguments.json_file,
        "--plot": arguments.plot_file,
    }
    if names := [name for name, value in unused.items() if value]:
        raise click.UsageError(
            f"--advise has strategies and tables of its own; leave out {', '.join(names)}"
        )


def give_advice(arguments: BenchArguments, prompts: list[str]) -> None:
    """Print how much the draft gains on this machine, and suggestions."""
    stderr = Console(stderr=True)
    with arguments.pipeline.open() as pipeline, Progress(console=stderr) as progress:
        task = progress.add_task("measuring", total=NUM_STEPS)
        advice = advise(pipeline, prompts, lambda: progress.advance(task))
        draft = pipeline.bundle.manifest.draft
    console = _stdout()
    title = f"{arguments.pipeline.bundle.name}, {arguments.pipeline.provider}"
    console.print(cost_table(advice, title))
    console.print(gain_table(advice))
    for line in sentences(advice, is_cheapest=draft is not None and "int4" in draft.quantization):
        console.print(line, highlight=False, soft_wrap=True)


def _stdout() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def _plotter(file: Path | None) -> Callable[[Sequence[RunSummary], str], None] | None:
    """Return a function that writes plots to ``file``; errors are raised now, not after hours."""
    if file is None:
        return None
    with packages_of("--plot", "bench"):
        from dsbd_ort.benchmark.plots import check_picture, plot
    check_picture(file)
    return lambda runs, title: plot(runs, title, file)


def _runs(arguments: BenchArguments) -> list[BenchRun]:
    strategies = arguments.strategies or (() if arguments.runs else DEFAULT_STRATEGIES)
    texts = [run_from_text(text, arguments.common) for text in arguments.runs]
    runs = [*runs_of(strategies, arguments.common), *texts]
    has_draft = open_bundle(arguments.pipeline.bundle).manifest.draft is not None
    runs = [dataclasses.replace(run, has_draft=has_draft) for run in runs]
    for run in runs:
        check_drafter(run.config, has_draft=has_draft)
    return runs


def run_from_text(text: str, common: CommonSettings) -> BenchRun:
    """Return the run of a text such as "dsbd num_beams=4 width_policy=fixed name=fast".

    Keys are the fields of DecodingConfig, ``name`` (of the run) and ``baseline`` (the name of the
    run to compare with, or none). Options that the text does not set are taken from ``common``.
    """
    try:
        strategy, *words = shlex.split(text)
    except ValueError as error:
        raise click.UsageError(
            f"--run {text!r} names no strategy; write one such as 'dsbd num_beams=4'"
        ) from error
    options: dict[str, Any] = {"strategy": strategy, **common.options_of(strategy)}
    settings: dict[str, str] = {}
    keys = [*_OWN_KEYS, *(name for name in OPTION_TABLE if name not in _NO_KEYS)]
    for word in words:
        key, is_pair, value = word.partition("=")
        if not is_pair or not value or key not in keys:
            raise click.UsageError(
                f"--run {text!r} has {word!r}; expected key=value with a key among "
                f"{', '.join(keys)}"
            )
        if key in _OWN_KEYS:
            settings[key] = value
        else:
            options[key] = _option_value(key, value)
    return BenchRun(
        options=options, given_name=settings.get("name"), baseline=settings.get("baseline")
    )


def _option_value(key: str, value: str) -> Any:
    try:
        return OptionText(key).convert(value, None, None)
    except click.UsageError as error:
        raise click.UsageError(f"--run has {key}={value}: {error.message}") from error


def _measured(arguments: BenchArguments, runs: list[BenchRun], prompts: list[str]) -> BenchReport:
    settings = arguments.pipeline
    machine, created = this_machine(), datetime.now(UTC).isoformat(timespec="seconds")
    energy = energy_meter([settings.provider, settings.draft_provider or settings.provider])
    stderr = Console(stderr=True)
    with settings.open() as pipeline:
        warmed = warm_up(pipeline, runs, prompts)
        for _ in track(warmed, "warming up", total=len(runs), console=stderr):
            pass
        requests = measure(
            pipeline,
            runs,
            prompts,
            repetitions=arguments.repetitions,
            seed=arguments.seed,
            clock=time.perf_counter,
            energy=energy,
        )
        total = arguments.repetitions * len(prompts) * len(runs)
        measurements = list(track(requests, "measuring", total=total, console=stderr))
        bundle = _bundle_info(settings.bundle, pipeline.bundle)
    return BenchReport(
        schema_version=SCHEMA_VERSION,
        created=created,
        bundle=bundle,
        machine=machine,
        versions=versions(__version__),
        provider=settings.provider,
        draft_provider=settings.draft_provider or settings.provider,
        threads=settings.num_threads,
        cuda_graphs=_uses_cuda_graphs(settings),
        energy_counters=energy.names,
        repetitions=arguments.repetitions,
        seed=arguments.seed,
        prompts=prompts,
        runs=summarize(runs, measurements),
        measurements=measurements,
    )


def _uses_cuda_graphs(settings: PipelineSettings) -> bool:
    if settings.cuda_graphs is not None:
        return settings.cuda_graphs
    return parse_placement(settings.provider).provider.uses_cuda_graphs


def _bundle_info(path: Path, bundle: Bundle) -> BundleInfo:
    names = [field.name for field in dataclasses.fields(EngineInfo)]
    engines = {
        role: EngineInfo(**{name: getattr(entry, name) for name in names})
        for role, entry in bundle.entry_by_role.items()
    }
    digest = hashlib.sha256((path / MANIFEST_NAME).read_bytes()).hexdigest()
    return BundleInfo(
        path=str(path),
        manifest_sha256=digest,
        target=engines["target"],
        draft=engines.get("draft"),
    )
