"""With AddressSanitizer and UndefinedBehaviorSanitizer the native library passes its own tests."""

import os
import subprocess
import sys

import pytest

from dsbd_ort.version import __version__
from scripts.debian_packages import Unavailable
from scripts.native_packages import prefix
from tests.made_once import made_once
from tests.native.conftest import ROOT, build
from tests.native.table_requests import PORTABLE

FOLDER = ROOT / "tests" / "native"
OPTIONS = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1",
    "LSAN_OPTIONS": f"suppressions={FOLDER / 'leaks.supp'}:print_suppressions=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
TESTS = (
    *("options", "drafts", "tokenizers", "bundle", "engine", "devices", "text", "programs"),
    *("command.py::test_documented_commands", "command.py::test_a_trie"),
    "memcheck.py::test_a_thousand_requests_of_eight_threads",
)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """The folder of the build; DSBD_NATIVE_SANITIZED names one that is built already."""
    if (given := os.environ.get("DSBD_NATIVE_SANITIZED")) is not None:
        return given
    try:
        packages = prefix()
    except Unavailable as error:
        pytest.skip(f"the native library cannot be built here: {error}")
    options = "-DDSBD_NATIVE_SANITIZE=ON", "-DCMAKE_BUILD_TYPE=Release"
    return made_once(
        tmp_path_factory, "sanitized", lambda folder: build(packages, folder, *options)
    )


@pytest.mark.long
@pytest.mark.parametrize("name", TESTS)
def test_with_sanitizers(sanitized, name):
    file, _, test = name.partition(".py::")
    tests = f"{FOLDER}/test_native_{file}.py{test and '::' + test}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-q", tests],
        env={**os.environ, **OPTIONS, "DSBD_NATIVE_BUILD": str(sanitized)},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.long
def test_drawn_requests_with_sanitizers(tmp_path):
    """The loop in C++ under Python, whose own leaks are not looked for."""
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1"
    options = f"-DCMAKE_CXX_FLAGS={flags}", f"-DPython_EXECUTABLE={sys.executable}"
    options += ("-DSKBUILD_PROJECT_VERSION=" + __version__, "-DCMAKE_BUILD_TYPE=Release")
    source = ROOT / "native" / "python"
    subprocess.run(["cmake", "-S", source, "-B", tmp_path, *options], check=True)
    subprocess.run(["cmake", "--build", tmp_path, "--parallel", "2"], check=True)
    libraries = [library_of_compiler(name) for name in ("libasan.so", "libstdc++.so")]
    environment = {**os.environ, **OPTIONS, **PORTABLE, "PYTHONPATH": str(tmp_path)}
    environment |= {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.native.table_requests", "400", "1"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-8000:]


def library_of_compiler(name: str) -> str:
    find = ["g++", f"-print-file-name={name}"]
    return subprocess.run(find, check=True, capture_output=True, text=True).stdout.strip()
