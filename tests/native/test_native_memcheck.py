"""Under valgrind's memcheck requests of several threads lose and misread no memory."""

import json
import random
import re
import shutil

import pytest

from tests.embedding.conftest import output_of
from tests.native.conftest import OWN_PROGRAMS, ROOT, with_json
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

NUM_THREADS = 8
OPTIONS = [
    {"strategy": "sample"},
    {"num_beams": 2},
    {"strategy": "beam-search", "num_beams": 3},
    {"strategy": "speculative"},
    {"coupling": "rejection"},
    {"drafter": "ngram", "num_beams": 2},
    {"strategy": "mjsd"},
    {"num_beams": 0},
]


def requests(number):
    rng = random.Random(0)
    for seed in range(number):
        ids = [rng.randrange(258) for _ in range(rng.randrange(1, 9))]
        options = {"ids": ids, "max_new_tokens": rng.randrange(1, 6), "seed": seed}
        yield {**options, **OPTIONS[seed % len(OPTIONS)]}


@pytest.fixture(scope="module")
def service(native_build, with_native):
    return with_native(OWN_PROGRAMS / "service.cpp", *with_json(native_build))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memcheck") / "bundle"
    return write_tiny_bundle(folder, target=TinyModel(logits="topk:16"), draft=TinyModel(seed=1))


@pytest.fixture
def any_bundle(request):
    """That of decoders, or of encoder-decoders."""
    if request.param == "decoders":
        return request.getfixturevalue("bundle")
    return request.getfixturevalue("source_pair") / "bundle"


def test_a_thousand_requests_of_eight_threads(service, bundle):
    text = "".join(f"{json.dumps(request)}\n" for request in requests(1000))
    done = output_of(service, bundle, str(NUM_THREADS), input=text)
    assert done.returncode == 0, done.stderr
    errors = ["error" in json.loads(answer) for answer in done.stdout.splitlines()]
    assert errors == [request.get("num_beams") == 0 for request in requests(1000)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
@pytest.mark.parametrize("number", [24, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("any_bundle", ["decoders", "encoder-decoders"], indirect=True)
def test_memcheck(service, any_bundle, tmp_path, number):
    log = tmp_path / "memcheck.log"
    suppressions = ROOT / "tests" / "native" / "memcheck.supp"
    command = ["valgrind", f"--suppressions={suppressions}", f"--log-file={log}"]
    command += ["--leak-check=full", service, any_bundle, str(NUM_THREADS)]
    text = "".join(f"{json.dumps(request)}\n" for request in requests(number))
    done = output_of(*command, input=text)
    assert done.returncode == 0, done.stderr
    assert re.search(r"ERROR SUMMARY: 0 errors", log.read_text()), log.read_text()
    assert re.search(r"definitely lost: 0 bytes", log.read_text()), log.read_text()
