"""Native threads of a C++ program share a pipeline: each gets what it would get alone."""

from __future__ import annotations

import json
import subprocess

from dsbd_ort import Pipeline
from tests.embedding.asked import answers, requests
from tests.embedding.conftest import PROGRAMS

NUM_THREADS = 4
ASKED = [request for request in requests() if isinstance(request.prompt, str)][::4]


def test_four_threads_at_once(compiled, tiny_bundle):
    with Pipeline.from_bundle(tiny_bundle.path, num_threads=1) as pipeline:
        expected = [result.sequences for result in answers(pipeline, ASKED)]
    done = subprocess.run(
        [compiled(PROGRAMS / "threads.cpp"), tiny_bundle.path, str(NUM_THREADS)],
        input="".join(f"{request.prompt}\t{json.dumps(request.options)}\n" for request in ASKED),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    times_seen = [0] * len(ASKED)
    for line in done.stdout.splitlines():
        index, streamed, result = line.split("\t")
        wanted = expected[int(index)]
        sequences = json.loads(result)["sequences"]
        assert [found["token_ids"] for found in sequences] == [w.token_ids for w in wanted]
        assert [found["text"] for found in sequences] == [w.text for w in wanted]
        assert [int(token) for token in streamed.split()] == wanted[0].token_ids
        times_seen[int(index)] += 1
    assert times_seen == [NUM_THREADS] * len(ASKED)
