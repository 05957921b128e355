"""The pieces of a check in order, with their actions and time limits."""

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.gpu.environment import install
from lab.gpu.runner import NotRunError, PieceError, Runner
from lab.gpu.settings import (
    CONTEXT,
    DRAFT_OPTIONS,
    FEATURE,
    RUNS,
    TOP_K,
    WEBGPU,
    Settings,
    Subject,
    subjects,
    twin_of,
)

Action = Callable[[Settings, Runner], dict[str, Any]]
_Measure = Callable[[Path, str, Settings, Runner], dict[str, Any]]
LIMIT_S, EXPORT_LIMIT_S = 90.0, 180.0  # pieces that measure; all others wait for the twin's export
TABLE = "table"
TABLES_NAME, RESULTS_NAME = "tables.txt", "gpu.json"  # in the work folder
SERVING_PREFIX, NATIVE_PREFIX, CACHES_PREFIX = "serving-", "native-", "caches-"
PARITY_PREFIX, BITS_PREFIX = "parity-", "bits-"
BENCH_PREFIX, DRAFT_PREFIX = "bench-", "draft-"
FAMILIES_PREFIX, FAMILIES_DTYPES = "families-", ("fp16", "fp32")
TENSORRT_SUFFIX = "-tensorrt"
_TENSORRT_MODULES = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx"}  # module: --engine
_UNKNOWN_GPU = "cannot be built for compute capability"
_TENSORRT_CAPACITY = 1024  # cache rows: a prompt, its continuation and the widest forest


@dataclass(frozen=True)
class Piece:
    """A part of a check that can be run alone.

    Attributes:
        name: its name in ``--only``.
        action: runs the piece; returns its measurements.
        limit_s: seconds it may take.
        is_repeated: whether the piece is run again although it has a result.
        needs_gpu: whether the piece needs what ``missing_requirements`` checks.
        is_answered: whether an earlier run answered it (lab/results/gpu.md).
    """

    name: str
    action: Action
    limit_s: float = LIMIT_S
    is_repeated: bool = False
    needs_gpu: bool = True
    is_answered: bool = False


def pieces(settings: Settings) -> list[Piece]:
    """Return the pieces of a check, in the order of what is not known.

    Pieces of the small bundles come before the export of the twin. Those that the first run on a
    GPU answered for CUDA come last.
    """
    every = subjects(settings)
    measured = [each for each in every if each.has_drafts or not each.name.endswith("-fp32")]
    measured = measured or every
    ordered = [Piece("install", install), Piece("machine", _machine)]
    for subject in measured:
        ordered += _pieces_of_export(subject, settings)
        ordered.append(Piece(f"{SERVING_PREFIX}{subject.name}", _of(subject, _serve)))
        if subject == measured[0]:
            ordered.append(_families_in(FAMILIES_DTYPES[0]))
    for subject in measured:
        if subject.has_drafts:
            ordered += [
                Piece(f"{DRAFT_PREFIX}{subject.name}-{draft}", _draft_action(subject, draft))
                for draft in DRAFT_OPTIONS
            ]
    for prefix, action in ((CACHES_PREFIX, _caches), (NATIVE_PREFIX, _native)):
        for subject in reversed(measured):
            ordered.append(Piece(f"{prefix}{subject.name}", _of(subject, action)))
    if settings.provider != WEBGPU:
        ordered += _pieces_of_tensorrt(every[0])
    ordered.append(_families_in(FAMILIES_DTYPES[1]))
    for subject in every:
        if subject not in measured:
            ordered += _pieces_of_export(subject, settings, is_answered=True)
    answered = functools.partial(Piece, is_answered=settings.provider == "cuda")
    for subject in every:
        ordered += [
            answered(f"{PARITY_PREFIX}{subject.name}", _on(subject, _plain, _compare)),
            answered(f"{BITS_PREFIX}{subject.name}", _on(subject, _plain, _count)),
        ]
        if settings.provider != WEBGPU:
            ordered.append(
                answered(f"{BENCH_PREFIX}{subject.name}", _on(subject, _plain, _measure))
            )
    return [*ordered, Piece(TABLE, _table, is_repeated=True, needs_gpu=False)]


def _pieces_of_export(
    subject: Subject, settings: Settings, *, is_answered: bool = False
) -> Iterator[Piece]:
    if subject.pair == twin_of(settings):
        yield Piece("make-twin", _make_twin, EXPORT_LIMIT_S)
    if subject.has_drafts and _trained(FEATURE, settings).exists():
        action = _of(subject, export_with_features)
        yield Piece(f"export-{subject.name}-{FEATURE}", action, EXPORT_LIMIT_S)
    if subject.pair is not None:
        name = f"export-{subject.name}"
        action = _of(subject, export_subject)
        yield Piece(name, action, EXPORT_LIMIT_S, is_answered=is_answered)


def _families_in(dtype: str) -> Piece:
    return Piece(f"{FAMILIES_PREFIX}{dtype}", functools.partial(_families, dtype))


def _pieces_of_tensorrt(subject: Subject) -> list[Piece]:
    name = f"{subject.name}{TENSORRT_SUFFIX}"
    return [
        Piece(f"build-{name}", _of(subject, _build_tensorrt)),
        Piece(f"{PARITY_PREFIX}{name}", _on(subject, _built_tensorrt, _compare)),
        Piece(f"{BITS_PREFIX}{name}", _on(subject, _built_tensorrt, _count)),
        Piece(f"{BENCH_PREFIX}{name}", _on(subject, _built_tensorrt, _measure)),
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


def _make_twin(settings: Settings, runner: Runner) -> dict[str, Any]:
    twin = twin_of(settings)
    if not twin.exists():
        words = ("--params", settings.params, "--context", str(CONTEXT), "-o", twin)
        runner.command("make_twin", *words)
    return {}


def export_subject(subject: Subject, settings: Settings, runner: Runner) -> dict[str, Any]:
    """Export a bundle; the target is that of the bundle with the feature draft, if there is one."""
    assert subject.pair is not None
    draft = ("--draft", subject.pair / "draft")
    with_features = _with_draft(subject, FEATURE)
    if not subject.bundle.exists() and with_features.exists():
        _add_draft(with_features, subject.bundle, draft, subject, runner)
    elif not subject.bundle.exists():
        target: tuple[str | Path, ...] = ("--target", subject.pair / "target", *subject.options)
        runner.command("dsbd-export", *target, *draft, "-o", subject.bundle)
    return {}


def export_with_features(subject: Subject, settings: Settings, runner: Runner) -> dict[str, Any]:
    """Export a bundle with the prepared feature draft; its target also returns features."""
    bundle, draft = _with_draft(subject, FEATURE), _trained(FEATURE, settings)
    assert subject.pair is not None
    target = subject.pair / "target"
    if not bundle.exists():
        if subject.pair == twin_of(settings):
            widened = draft.with_name(f"{FEATURE}-{settings.params}")
            shutil.rmtree(widened, ignore_errors=True)
            runner.command("widen-feature-draft", draft, target, widened)
            draft = widened
        pair = ("--target", target, "--draft", draft)
        runner.command("dsbd-export", *pair, *subject.options, "-o", bundle)
    return {}


def _add_draft(
    source: Path, bundle: Path, draft: tuple[str, Path], subject: Subject, runner: Runner
) -> None:
    """Write a bundle with the target of another and a draft of its own."""
    partial = bundle.with_name(f".{bundle.name}")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, copy_function=_link)
    runner.command("dsbd-export", "--bundle", partial, *draft, *subject.options)
    partial.rename(bundle)


def _trained(draft: str, settings: Settings) -> Path:
    return settings.work / "drafts" / draft


def _with_draft(subject: Subject, draft: str) -> Path:
    return subject.bundle.with_name(f"{subject.name}-{draft}")


def _draft_action(subject: Subject, draft: str) -> Action:
    """Return an action that measures a bundle with one of the prepared drafts."""

    def action(settings: Settings, runner: Runner) -> dict[str, Any]:
        checkpoint, bundle = _trained(draft, settings), _with_draft(subject, draft)
        if not checkpoint.exists():
            raise NotRunError(f"no draft {checkpoint}; lab/run gpu --prepare trains it")
        if not bundle.exists():
            _add_draft(subject.bundle, bundle, ("--draft", checkpoint), subject, runner)
        return _measure(bundle, settings.provider, settings, runner)

    return action


def _serve(subject: Subject, settings: Settings, runner: Runner) -> dict[str, Any]:
    return _at_a_time(subject, settings, runner, "--loop", "python", "--loop", "native")


def _native(subject: Subject, settings: Settings, runner: Runner) -> dict[str, Any]:
    library = settings.work / "native" / "libdsbd_native.so"
    if not library.exists():
        raise NotRunError(f"no {library}; lab/run gpu --prepare builds it")
    return _at_a_time(subject, settings, runner, "--loop", "library", "--library", str(library))


def _at_a_time(subject: Subject, settings: Settings, runner: Runner, *words: str) -> dict[str, Any]:
    file = settings.work / f"at-a-time-{subject.name}.json"
    words = (*words, "--max-new-tokens", str(settings.max_new_tokens))
    where = (str(subject.bundle), "--provider", settings.provider)
    return _json_of(runner, file, "lab.gpu.at_a_time", *where, *words)


def _caches(subject: Subject, settings: Settings, runner: Runner) -> dict[str, Any]:
    file = settings.work / f"{CACHES_PREFIX}{subject.name}.json"
    words = (str(subject.bundle), "--provider", settings.provider)
    return _json_of(runner, file, "lab.gpu.forward_times", *words)


def _families(dtype: str, settings: Settings, runner: Runner) -> dict[str, Any]:
    """Compare tiny bundles of all families with the CPU; a stopped run is continued."""
    if settings.provider == "cpu":
        raise NotRunError("the provider under test is cpu")
    if settings.provider == WEBGPU and dtype != "fp32":
        raise NotRunError("WebGPU's families are exported in fp32")
    folder, file = settings.work / "families", settings.work / f"{FAMILIES_PREFIX}{dtype}.json"
    if not folder.exists():
        raise NotRunError(f"no bundles {folder}; lab/run gpu --prepare exports them")
    words = (str(folder), "--provider", settings.provider, "--dtype", dtype)
    return _json_of(runner, file, "lab.gpu.families", *words, continues=True)


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


def _measure(bundle: Path, provider: str, settings: Settings, runner: Runner) -> dict[str, Any]:
    """Return the report of dsbd-bench without the list of its measurements."""
    words = [word for text in RUNS for word in ("--run", text)]
    words += ["--top-k", str(TOP_K), "--max-new-tokens", str(settings.max_new_tokens)]
    words += ["--repetitions", str(settings.repetitions), "--provider", provider]
    name = f"{BENCH_PREFIX}{bundle.name}"
    file, prompts = settings.work / f"{name}.json", settings.work / f"{name}.prompts.jsonl"
    runner.module("lab.gpu.prompt_file", prompts, str(settings.num_prompts))
    runner.command("dsbd-bench", bundle, *words, "--prompts", prompts, "--json", file)
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {key: value for key, value in report.items() if key != "measurements"}


def _table(settings: Settings, runner: Runner) -> dict[str, Any]:
    runner.module("lab.gpu.report", settings.work, settings.document)
    return {}


def _json_of(
    runner: Runner, file: Path, module: str, *words: str, continues: bool = False
) -> dict[str, Any]:
    """Return what a module writes to ``--json``.

    Raises:
        PieceError: the module failed or was stopped; the error has what was written until then.
    """
    if not continues:
        file.unlink(missing_ok=True)
    try:
        runner.module(module, *words, "--json", file)
    except PieceError as error:
        error.values = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        raise
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content
