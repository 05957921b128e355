"""Build of libdsbd.so against the running Python environment: cffi's C source, then a compiler."""

import io
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cffi import FFI

from dsbd_ort.embedding.calls import BuildError
from dsbd_ort.version import __version__

LIBRARY = "libdsbd.so"
HEADER = "dsbd.h"
MODULE = "_dsbd_library"
FOLDER = Path(__file__).parent
_START = f"""\
from {MODULE} import ffi, lib
from dsbd_ort.embedding.calls import join
join(ffi, lib, built_for={__version__!r})
"""


@dataclass(frozen=True)
class SharedPython:
    """The files of a Python installation that other programs can embed.

    executable: Python of the environment; its path determines where packages are found.
    headers: folder of Python.h.
    library: libpython3.x.so.
    name: "python3.x", for the linker.
    """

    executable: Path
    headers: Path
    library: Path
    name: str


def shared_python(executable: Path, variables: Mapping[str, Any]) -> SharedPython:
    """Return the files of a Python with these config variables; BuildError: a file is missing."""
    name = f"python{variables['LDVERSION']}"
    folders = [Path(variables["LIBDIR"]), Path(variables["installed_base"]) / "lib"]
    folders += [folder / (variables.get("MULTIARCH") or "") for folder in folders]
    places = list(dict.fromkeys(folder / f"lib{name}.so" for folder in folders))
    library = next((place for place in places if place.exists()), None)
    if library is None:
        raise BuildError(
            f"{executable} has no shared library (none of {', '.join(map(str, places))}); use a "
            "Python that was configured with --enable-shared, or install its development package, "
            "such as python3-dev"
        )
    headers = Path(variables["INCLUDEPY"])
    if not (headers / "Python.h").exists():
        raise BuildError(
            f"{headers / 'Python.h'} is missing; install the development package of {executable}, "
            "such as python3-dev"
        )
    return SharedPython(executable, headers, library, name)


def build_library(output: Path, compiler: str = "cc") -> None:
    """Write the library and its header into ``output``.

    BuildError: the compiler or a shared Python is missing, or the compiler fails.
    """
    if shutil.which(compiler) is None:
        raise BuildError(f"the C compiler {compiler} is missing; install gcc or clang, or set CC")
    python = shared_python(Path(sys.executable), sysconfig.get_config_vars())
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        source, library = Path(temporary) / "calls.c", Path(temporary) / LIBRARY
        source.write_text(c_source(), encoding="utf-8")
        command = [compiler, *_arguments(python), str(source), "-o", str(library)]
        command += [f"-l{python.name}", "-ldl", "-pthread"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"{compiler} exits with {done.returncode}:\n{done.stderr}")
        shutil.copy(library, output / LIBRARY)
    shutil.copy(FOLDER / HEADER, output / HEADER)


def _arguments(python: SharedPython) -> list[str]:
    folder = python.library.parent
    return [
        *("-std=c11", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{LIBRARY}"),
        *(f"-I{FOLDER}", f"-I{python.headers}", f"-L{folder}", f"-Wl,-rpath,{folder}"),
        f'-DDSBD_VERSION="{__version__}"',
        f'-DDSBD_PYTHON="{python.executable}"',
        f'-DDSBD_LIBPYTHON="{python.library.resolve().name}"',
        *(str(FOLDER / name) for name in ("library.c", "interpreter.c")),
    ]


def c_source() -> str:
    """Return the C file that connects the library to Python, compiled with the others."""
    ffi = FFI()
    ffi.embedding_api("")
    ffi.cdef(_declarations("dsbd.h"))
    ffi.cdef(f'extern "Python+C" {{ {_declarations("python_calls.h")} }}')
    ffi.cdef(_declarations("library.h"))
    ffi.embedding_init_code(_START)
    ffi.set_source(
        MODULE,
        '#include "library.h"\nint dsbd_start_calls(void) { return cffi_start_python(); }',
        compiler_verbose=0,
    )
    written = io.StringIO()
    ffi.emit_c_code(written)
    return written.getvalue()


def _declarations(header: str) -> str:
    text = (FOLDER / header).read_text(encoding="utf-8")
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.DOTALL)
    return re.sub(r"^#.*$", "", text, flags=re.MULTILINE).replace("DSBD_API ", "")
