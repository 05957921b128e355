"""Requirements of the build of the C library, and its messages if they are not met."""

import shutil
import subprocess
from pathlib import Path

import pytest

from dsbd_ort.embedding.calls import BuildError, join
from dsbd_ort.embedding.library_build import build_library, shared_python
from tests.test_import_boundaries import loaded_by

PYTHON = Path("/env/bin/python")
FUNCTIONS = {"close", "free", "generate", "last_error", "open", "stats", "version"}


@pytest.fixture
def variables(tmp_path):
    """Of a Python whose library stands in the folder of its architecture, as on Debian."""
    for folder in ("lib/x86_64-linux-gnu", "include"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "lib" / "x86_64-linux-gnu" / "libpython3.12.so").touch()
    (tmp_path / "include" / "Python.h").touch()
    return {
        "LDVERSION": "3.12",
        "LIBDIR": str(tmp_path / "lib"),
        "MULTIARCH": "x86_64-linux-gnu",
        "installed_base": "/usr",
        "INCLUDEPY": str(tmp_path / "include"),
    }


def test_the_files_of_a_python_are_found(variables, tmp_path):
    found = shared_python(PYTHON, variables)
    assert found.library == tmp_path / "lib" / "x86_64-linux-gnu" / "libpython3.12.so"
    assert (found.headers, found.name) == (tmp_path / "include", "python3.12")


def test_a_python_without_a_shared_library_is_refused(variables):
    with pytest.raises(BuildError, match=r"/env/bin/python has no shared library.*enable-shared"):
        shared_python(PYTHON, {**variables, "LDVERSION": "3.12d", "MULTIARCH": None})


def test_a_python_without_headers_is_refused(variables):
    with pytest.raises(BuildError, match=r"/nowhere/Python\.h is missing; install the develop"):
        shared_python(PYTHON, {**variables, "INCLUDEPY": "/nowhere"})


def test_a_machine_without_a_compiler_is_refused(tmp_path):
    with pytest.raises(
        BuildError, match="the C compiler no-such-cc is missing; install gcc or clang"
    ):
        build_library(tmp_path / "new", "no-such-cc")
    assert not (tmp_path / "new").exists()


def test_a_compiler_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(BuildError, match="false exits with 1"):
        build_library(tmp_path, "false")
    assert list(tmp_path.iterdir()) == []


def test_the_library_shows_its_functions_and_no_others(c_library):
    if shutil.which("nm") is None:
        pytest.skip("there is no nm")
    command = ["nm", "-D", "--defined-only", c_library / "libdsbd.so"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in done.stdout.splitlines()}
    assert names == {f"dsbd_{name}" for name in FUNCTIONS} | {"PyInit__dsbd_library"}


def test_a_library_of_another_version_is_refused():
    with pytest.raises(BuildError, match=r"was built for dsbd-ort 0\.0\.1.*build_c_library again"):
        join(None, None, built_for="0.0.1")


def test_only_the_build_needs_cffi():
    assert "cffi" not in loaded_by("import dsbd_ort, dsbd_ort.cli, dsbd_ort.embedding.calls")
