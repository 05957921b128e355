"""With AddressSanitizer and UndefinedBehaviorSanitizer the native library passes its own tests."""

import os
import subprocess
import sys

import pytest

from scripts.debian_packages import Unavailable
from scripts.native_packages import prefix
from tests.made_once import made_once
from tests.native.conftest import ROOT, build

FOLDER = ROOT / "tests" / "native"
OPTIONS = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1",
    "LSAN_OPTIONS": f"suppressions={FOLDER / 'leaks.supp'}:print_suppressions=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
TESTS = (
    *("loop", "laws", "options", "drafts", "tokenizers", "bundle", "engine", "text", "programs"),
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
