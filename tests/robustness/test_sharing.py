"""One pipeline for many threads and many requests: each gets what it would get alone."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsbd_ort import Pipeline
from dsbd_ort.decoding import WithResult
from dsbd_ort.model_pair import BusyError
from tests.robustness.preempting import TALLY, PreemptedPipeline

ROOT = Path(__file__).parents[2]
NUM_THREADS = 8
REQUESTS = [
    {"prompt": "ab", "seed": 1},
    {"prompt": "abcd", "seed": 2, "num_beams": 2},
    {"prompt": "ab", "seed": 3, "strategy": "beam-sample"},
    {"prompt": "hello", "seed": 1, "strategy": "beam-search"},
    {"prompt": "abce", "seed": 5, "coupling": "rejection"},
    {"prompt": [1, 2, 3], "seed": 6, "strategy": "mjsd"},
    {"prompt": "x", "seed": 7, "strategy": "greedy"},
    {"prompt": "hello you", "seed": 8, "stop_strings": "a"},
]


def ask(pipe, request, streamed=False):
    if not streamed:
        return pipe.generate(**request, max_new_tokens=8)
    stream = WithResult(pipe.stream(**request, max_new_tokens=8))
    list(stream)
    return stream.result


def tokens(result):
    return [sequence.token_ids for sequence in result.sequences]


@pytest.fixture(scope="module")
def lone_tokens(small_bundle):
    found = []
    for request in REQUESTS:
        with Pipeline.from_bundle(small_bundle, num_threads=1) as pipe:
            found.append(tokens(ask(pipe, request)))
    return found


def test_eight_threads_get_what_lone_requests_get(small_pipe, lone_tokens):
    together = threading.Barrier(NUM_THREADS)

    def work(first):
        together.wait()
        order = [(first + i) % len(REQUESTS) for i in range(2 * len(REQUESTS))]
        return [
            (index, tokens(ask(small_pipe, REQUESTS[index], streamed=turn % 2 == 1)))
            for turn, index in enumerate(order)
        ]

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for answers in pool.map(work, range(NUM_THREADS)):
            for index, found in answers:
                assert found == lone_tokens[index], REQUESTS[index]


def test_the_same_request_gives_the_same_tokens_a_hundred_times(small_bundle, lone_tokens):
    with PreemptedPipeline.from_bundle(small_bundle, num_threads=2) as pipe:
        for turn in range(100):
            assert tokens(ask(pipe, REQUESTS[0])) == lone_tokens[0], turn


def test_a_thread_that_would_wait_for_itself_is_refused(small_pipe, lone_tokens):
    steps = small_pipe.stream(**REQUESTS[1], max_new_tokens=8)
    next(steps)
    with pytest.raises(BusyError, match="has a stream of this pipeline that is not finished"):
        ask(small_pipe, REQUESTS[0])
    with pytest.raises(BusyError):
        ask(small_pipe, REQUESTS[0], streamed=True)
    steps.close()
    assert tokens(ask(small_pipe, REQUESTS[0])) == lone_tokens[0]


def test_a_stream_that_nobody_holds_any_more_frees_the_pipeline(small_pipe, lone_tokens):
    steps = small_pipe.stream(**REQUESTS[1], max_new_tokens=8)
    next(steps)
    del steps
    assert tokens(ask(small_pipe, REQUESTS[0])) == lone_tokens[0]


def test_another_thread_waits_for_a_stream_and_may_finish_it(small_pipe, lone_tokens):
    steps = small_pipe.stream(**REQUESTS[1], max_new_tokens=8)
    next(steps)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(ask, small_pipe, REQUESTS[0])
        rest = pool.submit(list, steps)
        assert rest.result(timeout=60)
        assert tokens(waiting.result(timeout=60)) == lone_tokens[0]


def test_close_does_not_wait_for_a_stream_of_its_own_thread(small_bundle):
    with PreemptedPipeline.from_bundle(small_bundle) as pipe:
        next(pipe.stream("ab", max_new_tokens=8))
        steps = pipe.stream("ab", max_new_tokens=8)
        next(steps)


MANY_REQUESTS = """
import resource, sys
from pathlib import Path
from tests.robustness.preempting import TALLY, PreemptedPipeline

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])

with PreemptedPipeline.from_bundle(sys.argv[1], num_threads=1) as pipe:
    for turn in range(1800):
        if turn == 800:  # caches and estimates have settled by then
            before = resident()
        pipe.generate("abcdefgh"[: 1 + turn % 8], num_beams=2, max_new_tokens=6, seed=turn)
    print(resident() / before, TALLY.num_preempted, TALLY.num_calls)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_thousand_requests_keep_no_memory(small_bundle):
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "export", "runtime"))
    done = subprocess.run(
        [sys.executable, "-c", MANY_REQUESTS, str(small_bundle)],
        env={"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    growth, num_preempted, num_calls = done.stdout.split()
    TALLY.add(int(num_preempted), int(num_calls))
    assert float(growth) < 1.02
