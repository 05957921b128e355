"""The C library, built once, and programs compiled with it."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
STANDARDS = {".c": ("gcc", "-std=c99"), ".cpp": ("g++", "-std=c++17")}
STRICT = ("-Wall", "-Wextra", "-Werror", "-pedantic", "-g")

Compile = Callable[[Path], Path]


def output_of(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program; return what it printed and how it ended."""
    return subprocess.run(command, capture_output=True, text=True, timeout=170, **options)


@pytest.fixture(scope="session")
def c_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that scripts/build_c_library writes."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("c_library")
    script = ROOT / "scripts" / "build_c_library"
    done = output_of(sys.executable, str(script), "--output", str(folder))
    if "no shared library" in done.stderr or "Python.h is missing" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def compiled(c_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compiles a program of ``programs/`` and links it with the library."""
    folder = tmp_path_factory.mktemp("programs")

    def compile_once(source: Path) -> Path:
        program = folder / source.stem
        compiler, standard = STANDARDS[source.suffix]
        if shutil.which(compiler) is None:
            pytest.skip(f"there is no {compiler}")
        if not program.exists():
            command = [compiler, standard, *STRICT, str(source), "-o", str(program)]
            command += [f"-I{c_library}", f"-L{c_library}", "-ldsbd", f"-Wl,-rpath,{c_library}"]
            command += ["-pthread", "-ldl"]
            done = output_of(*command)
            assert done.returncode == 0, done.stderr
        return program

    return compile_once
