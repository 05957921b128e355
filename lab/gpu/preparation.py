"""Preparation of a check on a machine with a network and a compiler: lab/run gpu --prepare.

Everything is written to the folders of WORK that a check uses, then packed into WORK/parts, files
small enough to be carried one by one. ``unpack`` is their end on the GPU machine.
"""

import functools
import shutil
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.gpu.pieces import Action, Piece, export_subject, export_with_features
from lab.gpu.runner import NotRunError, PieceError, Runner
from lab.gpu.settings import DEMO_PAIR, DRAFT_OPTIONS, FEATURE, ROOT, WEBGPU, Settings, subjects

PARTS = "parts"
PART_BYTES = 60_000_000
_PACKED = ("wheels", "bundles", "drafts", "families", "native")
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64")
_LIBRARY = "libonnxruntime.so"  # its name in the wheel begins so
_LIMIT_S = 3600.0


def preparing_pieces(settings: Settings) -> list[Piece]:
    """Return the pieces of a preparation; the last one packs."""
    actions: dict[str, Action] = {"wheels": _wheels, "native-library": _native_library}
    for draft in DRAFT_OPTIONS:
        actions[f"distill-{draft}"] = functools.partial(_distill, draft)
    for subject in subjects(settings):
        if subject.pair == DEMO_PAIR and subject.has_drafts:
            action = functools.partial(export_with_features, subject)
            actions[f"export-{subject.name}-{FEATURE}"] = action
        if subject.pair == DEMO_PAIR:
            actions[f"export-{subject.name}"] = functools.partial(export_subject, subject)
    actions["family-bundles"] = _family_bundles
    actions["pack"] = _pack
    return [
        Piece(name, action, _LIMIT_S, is_repeated=name == "pack", needs_gpu=False)
        for name, action in actions.items()
    ]


def unpack(parts: Path, work: Path) -> None:
    """Write the content of the parts to a work folder.

    Raises:
        PieceError: a part is missing. A missing last part is noticed by the archive's own end.
    """
    files = sorted(parts.glob("part-*"))
    numbers = [int(file.name.removeprefix("part-")) for file in files]
    missing = set(range(max(numbers, default=0) + 1)) - set(numbers)
    if missing:
        raise PieceError(f"{parts} lacks part-{min(missing):02}; carry it as well")
    work.mkdir(parents=True, exist_ok=True)
    whole = work / "parts.tar"
    with whole.open("wb") as out:
        for file in files:
            with file.open("rb") as part:
                shutil.copyfileobj(part, out)
    try:
        with tarfile.open(whole) as archive:
            archive.extractall(work, filter="data")
    except tarfile.ReadError as error:
        raise PieceError(f"{parts} has no complete archive: {error}") from error
    finally:
        whole.unlink()


def _wheels(settings: Settings, runner: Runner) -> dict[str, Any]:
    """Download ONNX Runtime for CUDA, and build the loop in C++ for the other machine's Python.

    All other packages are expected on the GPU machine; wheels in WORK/wheels are packed too.
    """
    if settings.provider == WEBGPU:
        raise NotRunError("WebGPU uses the packages of this Python")
    folder, python = settings.work / "wheels", settings.python_of_wheels
    if not any(folder.glob("onnxruntime_gpu-*")):
        words = [word for name in _PLATFORMS for word in ("--platform", name)]
        words += ["--only-binary=:all:", "--no-deps", "-d", str(folder), "onnxruntime-gpu>=1.31"]
        runner.run(python, "-m", "pip", "download", "--implementation", "cp", *words)
    if not any(folder.glob("dsbd_ort_native-*")):
        words = ["--no-deps", "-w", str(folder), str(ROOT / "native" / "python")]
        runner.run(python, "-m", "pip", "wheel", *words)
    return {"wheels": sorted(file.name for file in folder.glob("*.whl"))}


def _native_library(settings: Settings, runner: Runner) -> dict[str, Any]:
    """Build the native library for the ONNX Runtime that will load it."""
    build, file = settings.work / "native-build", settings.work / "packages.txt"
    runner.run("sh", "-c", '"$0" -m scripts.native_packages > "$1"', runner.python, file)
    words = [f"-DCMAKE_PREFIX_PATH={file.read_text(encoding='utf-8').split()[-1]}"]
    for wheel in (settings.work / "wheels").glob("onnxruntime_gpu-*"):
        library = settings.work / _LIBRARY
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (each for each in archive.namelist() if Path(each).name.startswith(_LIBRARY))
            library.write_bytes(archive.read(name))
        words.append(f"-DONNXRUNTIME_LIBRARY={library}")
    runner.run("cmake", "-S", ROOT / "native", "-B", build, *words)
    runner.run("cmake", "--build", build, "--target", "dsbd_native", "--parallel")
    (settings.work / "native").mkdir(exist_ok=True)
    shutil.copy(build / "libdsbd_native.so", settings.work / "native")
    return {}


def _family_bundles(settings: Settings, runner: Runner) -> dict[str, Any]:
    words = (settings.work / "families", "--provider", settings.provider)
    runner.module("lab.gpu.family_bundles", *words)
    return {}


def _distill(draft: str, settings: Settings, runner: Runner) -> dict[str, Any]:
    """Train a draft of the demo target on Python's standard library."""
    output = settings.work / "drafts" / draft
    if not output.exists():
        data = ("--data", f"{sysconfig.get_path('stdlib')}/*.py", "--no-speed")
        words = (*DRAFT_OPTIONS[draft], *data, "--minutes", str(settings.draft_minutes))
        runner.command("dsbd-distill", "--target", DEMO_PAIR / "target", *words, "-o", output)
    return {}


def _pack(settings: Settings, runner: Runner) -> dict[str, Any]:
    """Write the parts of an archive of everything that was prepared."""
    parts, whole = settings.work / PARTS, settings.work / "parts.tar"
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir()
    with tarfile.open(whole, "w", dereference=True) as archive:
        for name in _PACKED:
            if (settings.work / name).exists():
                archive.add(settings.work / name, name)
    for number, content in enumerate(_chunks(whole)):
        (parts / f"part-{number:02}").write_bytes(content)
    whole.unlink()
    return {"files": [file.name for file in sorted(parts.iterdir())]}


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while content := opened.read(PART_BYTES):
            yield content
