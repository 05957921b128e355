"""Ids for searches, and ours and transformers, which search them alike."""

import gc
from pathlib import Path

import numpy as np
import pytest

from dsbd_export.demo import demo_pair
from lab.peers.catalog import OURS
from lab.peers.ids import LENGTH, Ids, made_ids
from lab.peers.retrieval import retrieval_peers
from lab.peers.runners import run_dsbd_ort, run_transformers
from lab.peers.runners.serve import Asked
from lab.peers.searches import SCORE_TOLERANCE, score_difference
from tests.lab.peers.samples import job_of, request_of

WIDTH = 12
RUNNERS = {OURS: run_dsbd_ort, "transformers": run_transformers}


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    return Ids.written(tmp_path_factory.mktemp("ids"), 3000, 4096)


def searched(peer, run, bundle: Path, ids: Ids, prompt_ids):
    opened = RUNNERS[peer.name].open_job(job_of(run, bundle, *demo_pair()))
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


VOCAB_SIZE = 16 + LENGTH * 10  # room for 10 codes


def test_ids_are_different_and_each_place_has_codes_of_its_own():
    ids = made_ids(5000, VOCAB_SIZE)
    assert ids.shape == (5000, LENGTH) and ids.dtype == np.int32
    assert len({*map(tuple, ids.tolist())}) == 5000
    codes = [set(column.tolist()) for column in ids.T]
    assert [len(each) for each in codes] == [10] * LENGTH
    assert len(set.union(*codes)) == 10 * LENGTH
    assert min(set.union(*codes)) >= 16 and max(set.union(*codes)) < VOCAB_SIZE
    assert (made_ids(5000, VOCAB_SIZE) == ids).all()
    wide = made_ids(5000, 2000)
    assert [len(np.unique(column)) for column in wide.T] == [256] * LENGTH


def test_codes_are_equally_frequent_and_independent():
    ids = made_ids(5000, VOCAB_SIZE)
    for one in range(LENGTH):
        _, counts = np.unique(ids[:, one], return_counts=True)
        assert abs(counts - 500).max() < 120  # 5.6 standard deviations
        _, counts = np.unique(ids[:, [one, (one + 1) % LENGTH]], axis=0, return_counts=True)
        assert len(counts) == 100 and abs(counts - 50).max() < 40


@pytest.mark.parametrize(
    ("num_ids", "vocab_size", "words"),
    [(5001, 59, "room for 4 x 10 codes, so give 5000 ids or fewer"), (1, 10, "0 codes")],
)
def test_too_few_tokens_or_codes_are_refused(num_ids, vocab_size, words):
    with pytest.raises(ValueError, match=words):
        made_ids(num_ids, vocab_size)


def test_different_ids_among_sequences_are_counted(tmp_path):
    ids = Ids.written(tmp_path, 1000, 2000)
    known = np.load(ids.file)
    assert (known == made_ids(1000, 2000)).all()
    first, second = known[:2].tolist()
    assert ids.num_legal([first, second, first]) == 2
    assert ids.num_legal([first[:3], [*second, 5], first[::-1]]) == 0
    np.save(ids.file, known[:1])  # is not made again
    assert Ids.written(tmp_path, 1000, 2000).num_legal([first, second]) == 1
    assert [file.name for file in tmp_path.iterdir()] == [ids.file.name]
