"""Under valgrind's memcheck: no request loses memory, and the library misreads none."""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.embedding.conftest import PROGRAMS, output_of

NUM_ROUNDS = 3
MOST_KEPT_BYTES = 4096  # of a round of four requests: Python's dictionaries grow now and then
SUPPRESSIONS = Path(__file__).parent / "memcheck.supp"
HEADER = Path("/usr/include/valgrind/memcheck.h")


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("valgrind") and HEADER.exists()), reason="valgrind is not installed"
)
def test_no_request_loses_memory(compiled, tiny_bundle, tmp_path):
    log = tmp_path / "memcheck.log"
    command = ["valgrind", f"--suppressions={SUPPRESSIONS}", f"--log-file={log}"]
    command += ["--leak-check=no", compiled(PROGRAMS / "leaks.c"), tiny_bundle.path]
    environment = {**os.environ, "PYTHONMALLOC": "malloc"}
    done = output_of(*command, str(NUM_ROUNDS), env=environment)
    assert done.returncode == 0, done.stderr + log.read_text()
    _, (rounds, lost, reachable), (rounds_in_the_end, lost_in_the_end, reachable_in_the_end) = [
        tuple(map(int, line.split())) for line in done.stdout.splitlines()
    ]
    assert (rounds, rounds_in_the_end) == (NUM_ROUNDS, 4 * NUM_ROUNDS)
    assert lost_in_the_end == lost
    assert reachable_in_the_end - reachable < (rounds_in_the_end - rounds) * MOST_KEPT_BYTES
    assert re.search(r"ERROR SUMMARY: 0 errors", log.read_text()), log.read_text()
