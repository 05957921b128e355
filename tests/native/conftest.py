"""The native library and its test programs, configured and built once for a test run."""

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from scripts.debian_packages import Unavailable
from scripts.native_packages import prefix
from tests.made_once import made_once

ROOT = Path(__file__).parents[2]
OWN_PROGRAMS = Path(__file__).parent / "programs"


def run_or_fail(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def build(packages: Path, folder: Path, *more: str) -> Path:
    options = [f"-DCMAKE_PREFIX_PATH={packages}", "-DDSBD_NATIVE_TESTS=ON", *more]
    run_or_fail("cmake", "-S", ROOT / "native", "-B", folder, *options)
    run_or_fail("cmake", "--build", folder, "--parallel", str(os.cpu_count()))
    return folder


@pytest.fixture(scope="session")
def native_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build's folder: libdsbd_native.so, dsbd_native, and the programs in ``tests``.

    DSBD_NATIVE_BUILD names a folder that is built already.
    """
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("there is no cmake, or no C++ compiler")
    if (given := os.environ.get("DSBD_NATIVE_BUILD")) is not None:
        return Path(given)
    try:
        packages = prefix()
    except Unavailable as error:
        pytest.skip(f"the native library cannot be built here: {error}")
    return made_once(tmp_path_factory, "native", partial(build, packages))


STANDARDS = {".c": ("cc", "-std=c99"), ".cpp": ("c++", "-std=c++17")}
STRICT = ("-Wall", "-Wextra", "-Werror", "-pedantic", "-g")


@pytest.fixture(scope="session")
def with_native(
    native_build: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Compiles a program that was written for dsbd.h and links it with the native library."""
    folder = tmp_path_factory.mktemp("programs")

    def compile_once(source: Path, *more: str) -> Path:
        program = folder / source.stem
        compiler, standard = STANDARDS[source.suffix]
        if not program.exists():
            options = [f"-I{ROOT / 'dsbd_ort' / 'embedding'}", f"-I{ROOT / 'native'}"]
            options += [f"-L{native_build}", "-ldsbd_native", f"-Wl,-rpath,{native_build}"]
            if cached(native_build, "DSBD_NATIVE_SANITIZE") == "ON":
                options.append("-fsanitize=address,undefined")
            command = [compiler, standard, *STRICT, str(source), "-o", str(program), *options]
            run_or_fail(*command, *more, "-pthread", "-ldl")
        return program

    return compile_once


def cached(build: Path, name: str) -> str:
    """Return a variable of a build of CMake."""
    lines = (build / "CMakeCache.txt").read_text().splitlines()
    return next(line.partition("=")[2] for line in lines if line.startswith(f"{name}:"))


def with_json(build: Path) -> list[str]:
    """Return the options of a compiler that finds nlohmann/json as the build has."""
    return ["-isystem", f"{cached(build, 'CMAKE_PREFIX_PATH')}/include"]
