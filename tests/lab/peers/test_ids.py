"""Ids for searches: different, of the codes of their place, the same for every tool and run."""

from __future__ import annotations

import numpy as np
import pytest

from lab.peers.ids import LENGTH, Ids, made_ids

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
