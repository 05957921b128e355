"""Ours and transformers search the ids of a file alike, with the options of the comparison."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from dsbd_export.demo import demo_pair
from lab.peers.catalog import OURS
from lab.peers.ids import Ids
from lab.peers.retrieval import retrieval_peers
from lab.peers.runners import run_dsbd_ort, run_transformers
from lab.peers.runners.serve import Asked, Job
from lab.peers.searches import SCORE_TOLERANCE, score_difference
from tests.lab.peers.samples import request_of

WIDTH = 12
RUNNERS = {OURS: run_dsbd_ort, "transformers": run_transformers}


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    return Ids.written(tmp_path_factory.mktemp("ids"), 3000, 4096)


def searched(peer, run, bundle: Path, ids: Ids, prompt_ids):
    """The request of a run, as the runner answers it."""
    target, draft = map(str, demo_pair())
    options = dict(run.options)
    job = Job(
        target=target,
        draft=draft,
        folder=str(bundle),
        precision=run.precision,
        task=run.task,
        options=options,
        num_threads=1,
    )
    opened = RUNNERS[peer.name].open_job(job)
    asked = Asked(prompt_ids=prompt_ids, max_new_tokens=4, seed=0, ids_file=str(ids.file))
    answered = opened.generate(asked)
    found = {"sequences": answered.sequences, "scores": answered.scores}
    return request_of(peer.name, run.name, 1.0, answered.token_ids, **found)


def test_all_runs_that_hold_to_the_ids_find_the_same(demo_bundle, ids):
    known = {tuple(row) for row in np.load(ids.file).tolist()}
    for prompt_ids in ([5, 900, 17, 2000], [3001]):
        found = [
            searched(peer, run, demo_bundle, ids, prompt_ids)
            for peer in retrieval_peers([WIDTH])
            for run in peer.runs
            if peer.name in RUNNERS and run.precision == "fp32"
        ]
        gc.collect()  # closes the pipelines
        assert len(found) == 3
        for request in found:
            assert {tuple(sequence) for sequence in request.sequences} <= known
            assert len(request.sequences) == WIDTH
            assert request.token_ids == request.sequences[0]
            assert request.scores == sorted(request.scores, reverse=True)
            assert score_difference(found[0], request) <= SCORE_TOLERANCE
