"""The pieces of a check in order, with their actions and time limits."""

import functools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.gpu.environment import install
from lab.gpu.runner import NotRunError, PieceError, Runner
from lab.gpu.settings import TOP_K, WEBGPU, Settings, Subject, run_texts, subjects

Action = Callable[[Settings, Runner], dict[str, Any]]
_Measure = Callable[[Path, str, Settings, Runner], dict[str, Any]]
TABLE = "table"
TABLES_NAME = "tables.txt"  # written by the piece to the work folder
FORWARDS_PREFIX, PARITY_PREFIX = "forwards-", "parity-"
BITS_PREFIX, BENCH_PREFIX = "bits-", "bench-"
FAMILIES = "families"
GRAPHS_SUFFIX, TENSORRT_SUFFIX = "-no-graphs", "-tensorrt"
_TENSORRT_MODULES = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx"}  # module: --engine
_UNKNOWN_GPU = "cannot be built for compute capability"
_TENSORRT_CAPACITY = 1024  # cache rows: a prompt, its continuation and the widest forest


@dataclass(frozen=True)
class Piece:
    """A part of a check that can be run alone.

    Attributes:
        name: its name in ``--only``.
        limit_s: seconds it may take.
        action: runs the piece; returns its measurements.
        is_repeated: whether the piece is run again although it has a result.
        needs_gpu: whether the piece needs what ``missing_requirements`` checks.
    """

    name: str
    limit_s: float
    action: Action
    is_repeated: bool = False
    needs_gpu: bool = True


def pieces(settings: Settings) -> list[Piece]:
    """Return the pieces of a check.

    The forwards of every bundle come first, because they show how the rest should be set. Each
    bundle is timed before the next, larger one is exported.
    """
    all_pieces = [Piece("install", 120, install), Piece("machine", 20, _machine)]
    every = subjects(settings)
    for subject in every:
        if subject.export:
            all_pieces.append(Piece(f"export-{subject.name}", 180, _of(subject, _export)))
        all_pieces.append(Piece(f"{FORWARDS_PREFIX}{subject.name}", 120, _of(subject, _forwards)))
    all_pieces.append(Piece(FAMILIES, 400, _families))
    tested = [subject for subject in every if not subject.is_variant]
    has_all = settings.provider != WEBGPU  # WebGPU: no benchmark, no CUDA graphs, no TensorRT
    for subject in tested:
        all_pieces += [
            Piece(f"{PARITY_PREFIX}{subject.name}", 60, _on(subject, _plain, _compare)),
            Piece(f"{BITS_PREFIX}{subject.name}", 60, _on(subject, _plain, _count)),
        ]
        if has_all:
            all_pieces.append(
                Piece(f"{BENCH_PREFIX}{subject.name}", 90, _on(subject, _plain, _measure))
            )
    for subject in tested if has_all else ():
        name = f"{BENCH_PREFIX}{subject.name}{GRAPHS_SUFFIX}"
        all_pieces.append(Piece(name, 90, _of(subject, _bench_without_graphs)))
    for subject in tested if has_all else ():
        all_pieces += _pieces_of_tensorrt(subject)
    return [*all_pieces, Piece(TABLE, 20, _table, is_repeated=True, needs_gpu=False)]


def _pieces_of_tensorrt(subject: Subject) -> list[Piece]:
    name = f"{subject.name}{TENSORRT_SUFFIX}"
    return [
        Piece(f"build-{name}", 120, _of(subject, _build_tensorrt)),
        Piece(f"{PARITY_PREFIX}{name}", 60, _on(subject, _built_tensorrt, _compare)),
        Piece(f"{BITS_PREFIX}{name}", 60, _on(subject, _built_tensorrt, _count)),
        Piece(f"{BENCH_PREFIX}{name}", 90, _on(subject, _built_tensorrt, _measure)),
    ]


def _of(subject: Subject, action: Callable[[Subject, Settings, Runner], dict[str, Any]]) -> Action:
    return functools.partial(action, subject)


def _on(subject: Subject, place: Callable[..., tuple[Path, str]], measure: _Measure) -> Action:
    """Return an action that measures what ``place`` returns: a bundle and its provider."""
    return lambda settings, runner: measure(*place(subject, settings, runner), settings, runner)


def _plain(subject: Subject, settings: Settings, runner: Runner) -> tuple[Path, str]:
    return subject.bundle, settings.provider


def _machine(settings: Settings, runner: Runner) -> dict[str, Any]:
    file = settings.work / "machine.json"
    return _json_of(runner, file, "lab.gpu.machine", "--provider", settings.provider)


def _export(subject: Subject, settings: Settings, runner: Runner) -> dict[str, Any]:
    made = []
    for name, *words in subject.export:
        folder = words[words.index("-o") + 1]
        if not Path(folder).exists():
            runner.command(name, *words)
            made.append(folder)
    return {"made": made}


def _forwards(subject: Subject, settings: Settings, runner: Runner) -> dict[str, Any]:
    file = settings.work / f"{FORWARDS_PREFIX}{subject.name}.json"
    words = (str(subject.bundle), "--provider", settings.provider)
    return _json_of(runner, file, "lab.gpu.forward_times", *words)


def _families(settings: Settings, runner: Runner) -> dict[str, Any]:
    if settings.provider == "cpu":
        raise NotRunError("the provider under test is cpu")
    try:
        runner.run(runner.python, "-c", "import dsbd_export.pipeline")
    except PieceError as error:
        raise NotRunError(f"the packages of the export are not there: {error}") from error
    file = settings.work / "families.json"
    return _json_of(runner, file, "lab.gpu.families", "--provider", settings.provider)


def _bench_without_graphs(subject: Subject, settings: Settings, runner: Runner) -> dict[str, Any]:
    if settings.provider != "cuda":
        raise NotRunError(f"provider {settings.provider} has no CUDA graphs")
    return _measure(subject.bundle, settings.provider, settings, runner, "--no-cuda-graphs")


def _build_tensorrt(subject: Subject, settings: Settings, runner: Runner) -> dict[str, Any]:
    engine = _tensorrt_engine(settings, runner)
    if not subject.bundle.is_dir():
        raise PieceError(f"no bundle {subject.bundle}")
    copy = _tensorrt_bundle(subject, settings)
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(subject.bundle, copy, copy_function=_link)
    words = ("--bundle", copy, "--engine", engine, "--capacity", str(_TENSORRT_CAPACITY))
    try:
        runner.command("dsbd-export", *words)
    except PieceError as error:
        shutil.rmtree(copy, ignore_errors=True)
        if _UNKNOWN_GPU in str(error):  # not caused by the bundle
            raise NotRunError(str(error)) from error
        raise
    return {"engine": engine}


def _built_tensorrt(subject: Subject, settings: Settings, runner: Runner) -> tuple[Path, str]:
    """Return the bundle with TensorRT engines, and their provider."""
    engine, bundle = _tensorrt_engine(settings, runner), _tensorrt_bundle(subject, settings)
    if not bundle.is_dir():
        raise NotRunError(f"no engines in {bundle}: see build-{subject.name}{TENSORRT_SUFFIX}")
    return bundle, engine


def _tensorrt_engine(settings: Settings, runner: Runner) -> str:
    """Return the value of --engine for the first TensorRT package that can be imported."""
    if settings.provider == "cpu":
        raise NotRunError("the provider under test is cpu")
    reasons = []
    for module, engine in _TENSORRT_MODULES.items():
        try:
            runner.run(runner.python, "-c", f"import {module}")
            return engine
        except PieceError as error:
            reasons.append(f"{module}: {error}")
    raise NotRunError("; ".join(reasons))


def _tensorrt_bundle(subject: Subject, settings: Settings) -> Path:
    return settings.work / "bundles" / f"{subject.name}{TENSORRT_SUFFIX}"


def _link(source: str, target: str) -> None:
    """Link a file where the file system supports it, else copy it (possibly gigabytes)."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _compare(bundle: Path, provider: str, settings: Settings, runner: Runner) -> dict[str, Any]:
    words = ["--provider", provider, "--max-new-tokens", str(settings.max_new_tokens)]
    words += ["--num-prompts", str(settings.num_prompts)]
    file = settings.work / f"parity-{bundle.name}.json"
    return _json_of(runner, file, "lab.gpu.parity", str(bundle), *words)


def _count(bundle: Path, provider: str, settings: Settings, runner: Runner) -> dict[str, Any]:
    file = settings.work / f"bits-{bundle.name}.json"
    return _json_of(runner, file, "lab.gpu.kinds_of_ways", str(bundle), "--provider", provider)


def _measure(
    bundle: Path, provider: str, settings: Settings, runner: Runner, *options: str
) -> dict[str, Any]:
    """Return the report of dsbd-bench without the list of its measurements."""
    words = [word for text in run_texts() for word in ("--run", text)]
    words += ["--top-k", str(TOP_K), "--max-new-tokens", str(settings.max_new_tokens)]
    words += ["--repetitions", str(settings.repetitions), "--provider", provider, *options]
    name = "-".join(["bench", bundle.name, *(option.strip("-") for option in options)])
    file, prompts = settings.work / f"{name}.json", settings.work / f"{name}.prompts.jsonl"
    runner.module("lab.gpu.prompt_file", prompts, str(settings.num_prompts))
    runner.command("dsbd-bench", bundle, *words, "--prompts", prompts, "--json", file)
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {key: value for key, value in report.items() if key != "measurements"}


def _table(settings: Settings, runner: Runner) -> dict[str, Any]:
    runner.module("lab.gpu.report", settings.work, settings.document)
    return {}


def _json_of(runner: Runner, file: Path, module: str, *words: str) -> dict[str, Any]:
    file.unlink(missing_ok=True)
    runner.module(module, *words, "--json", file)
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content
