"""Recent rows of random forests: what an engine is told reads every path whole, folded or not."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsbd_forward.forward import Forward
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.recent.fold_chains import FOLDED_TOGETHER, STAY_RECENT
from dsbd_runtime.parts.recent.recent_paths import MOST_HELD, RecentPaths
from tests.state_tables import StateMemory, after

NUM_ANCESTORS = 3
MOST_NEW = 64


class PathEngine:
    """An engine over ``RecentPaths``: its output is the state of a path, and its last tokens."""

    def __init__(self):
        self.memory = StateMemory()
        self.recent = RecentPaths(self.memory, NUM_ANCESTORS)
        self.paths = []  # by row of the cache, its tokens
        self.num_again = 0

    def forward(self, forward):
        """Append rows and check what is read of all of them."""
        for start in range(0, forward.num_new, MOST_NEW):
            part = forward.part(start, min(start + MOST_NEW, forward.num_new))
            self.recent.prepare(part)
            for again, rows in self.recent.again(part, MOST_NEW):
                self.num_again += len(rows)
                self._call(self.recent.new_rows(again, rows), [self.paths[row] for row in rows])
                self.recent.prepare(part)
            paths = []
            for token, parent in zip(part.token_ids.tolist(), part.parents.tolist(), strict=True):
                above = [] if parent < 0 else [*self.paths, *paths][parent]
                paths.append([*above, token])
            self._call(self.recent.new_rows(part), paths)
            self.paths += paths

    def _call(self, new, paths):
        rows, num_new = self.memory.rows, new.forward.num_new
        rows[new.first_row : new.first_row + num_new] = new.forward.token_ids
        places = new.checkpoint_rows.ravel()[new.row_places]
        assert np.array_equal(places, np.arange(num_new))
        numbers = new.row_places // new.checkpoint_rows.shape[1] + new.first_checkpoint
        for row, path in enumerate(paths):
            state = self.memory.states[numbers[row]]
            tokens = rows[new.mask[row].nonzero()[0]].tolist()
            assert tokens == path[len(path) - len(tokens) :]  # in the order of the path
            assert functools.reduce(after, tokens, state) == functools.reduce(after, path, 0)
            above = [rows[place] if place >= 0 else 0 for place in new.ancestors[row]]
            assert above == [0] * (NUM_ANCESTORS + 1 - len(path)) + path[-1 - NUM_ANCESTORS : -1]
        self.recent.append(new)

    def keep(self, rows):
        self.recent.keep(rows)
        self.paths = [self.paths[row] for row in rows]


class Forest:
    """Rows of a cache and which of them each sees, as a decoder keeps them."""

    def __init__(self, rng):
        self.rng = rng
        self.engine = PathEngine()
        self.seen = np.zeros((0, 0), np.bool_)

    def append(self, parents):
        """Append rows below others, -1 for none, which may be new ones."""
        old, num_new = len(self.seen), len(parents)
        whole = np.zeros((old + num_new, old + num_new), np.bool_)
        whole[:old, :old] = self.seen
        for row, parent in enumerate(parents, old):
            if parent >= 0:
                whole[row] = whole[parent]
            whole[row, row] = True
        mask, self.seen = whole[old:], whole
        tokens = self.rng.integers(1, 1 << 30, num_new)
        self.engine.forward(Forward(tokens, mask.sum(1) - 1, mask, np.arange(0)))

    def chain(self, num_rows, parent):
        """Append a chain; return its last row."""
        first = len(self.seen)
        self.append([parent, *range(first, first + num_rows - 1)])
        return len(self.seen) - 1

    def keep(self, leaves):
        """Keep the paths to these rows; return where they are now."""
        kept = self.seen[leaves].any(0).nonzero()[0]
        self.seen = self.seen[np.ix_(kept, kept)]
        self.engine.keep(kept)
        return np.searchsorted(kept, leaves).tolist()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_random_forests_read_whole_paths(seed):
    """Beams, drafts, requests that begin alike, rows dropped now and then."""
    rng = np.random.default_rng(seed)
    forest = Forest(rng)
    leaves = [forest.chain(int(rng.integers(1, 200)), -1)]
    for _ in range(int(rng.integers(1, 25))):
        first, parents = len(forest.seen), []
        for leaf in leaves:
            for _ in range(int(rng.integers(1, 4))):  # drafts
                above = [leaf, *range(first + len(parents), first + len(parents) + 30)]
                parents += above[: int(rng.integers(1, 31))]
        if rng.random() < 0.1:  # a path that branches off anywhere
            parents.append(int(rng.integers(-1, first)))
        forest.append(parents)
        new = range(first, len(forest.seen))
        size = min(len(new), int(rng.integers(1, 4)))
        leaves = rng.choice(new, size=size, replace=False).tolist()
        if rng.random() < 0.4:
            leaves = forest.keep(sorted(leaves))
    assert max(forest.engine.memory.folds, default=0) < 1000


def test_what_is_kept_is_flat_in_the_length():
    """Of one beam whose rejected drafts are dropped now and then."""
    forest = Forest(np.random.default_rng(0))
    recent, leaf = forest.engine.recent, forest.chain(300, -1)
    most = 0
    for step in range(500):
        first = len(forest.seen)
        forest.append([leaf, first, first + 1, leaf, first + 3])
        leaf = first + 2
        if step % 12 == 0:
            (leaf,) = forest.keep([leaf])
        most = max(most, recent.num_recent)
    assert len(forest.engine.paths[leaf]) == 1800
    assert most <= STAY_RECENT + FOLDED_TOGETHER + 5 * 14 + 16
    assert recent.num_checkpoints <= 1 + 1 + MOST_HELD
    assert forest.engine.num_again == 0
    assert min(forest.engine.memory.folds) >= FOLDED_TOGETHER


def test_beams_that_parted_are_folded_each():
    forest = Forest(np.random.default_rng(0))
    start = forest.chain(70, -1)
    leaves = [start] * 4
    for _ in range(200):
        first = len(forest.seen)
        forest.append(leaves)
        leaves = list(range(first, first + 4))
    recent = forest.engine.recent
    assert recent.num_recent <= 4 * (STAY_RECENT + FOLDED_TOGETHER + 16)
    assert recent.num_checkpoints <= 1 + 4 + MOST_HELD
    (leaf,) = forest.keep(leaves[:1])
    assert recent.num_checkpoints <= 1 + 4 + MOST_HELD
    assert recent.num_recent <= STAY_RECENT + FOLDED_TOGETHER + 16
    forest.chain(3, leaf)
    assert forest.engine.num_again == 0


@pytest.mark.parametrize("cut", [1, 40, 300, 511, 640, 799, 800])
def test_a_path_branches_off_anywhere(cut):
    """At most half of it is computed again, and never twice."""
    forest = Forest(np.random.default_rng(0))
    forest.chain(800, -1)
    path = list(range(cut))
    again = []
    for _ in range(3):
        before = forest.engine.num_again
        forest.chain(100, path[-1])
        again.append(forest.engine.num_again - before)
    assert max(again) <= max(255 + MOST_NEW, cut // 2 + MOST_NEW)
    assert np.count_nonzero(again) <= 1
    if cut > 800 - STAY_RECENT:
        assert again[0] == 0  # none of the last rows is folded


def test_a_forward_that_failed_is_forgotten():
    """Of its two calls the first has been made, and has folded rows that were there before."""
    forest = Forest(np.random.default_rng(0))
    leaf = forest.chain(60, -1)
    recent = forest.engine.recent
    seen, paths = forest.seen, list(forest.engine.paths)
    forest.chain(100, leaf)
    assert forest.engine.memory.folds
    recent.truncate(60)
    forest.seen, forest.engine.paths = seen, paths
    forest.chain(40, leaf)
    forest.chain(40, 10)


def test_half_a_path_is_refused():
    forest = Forest(np.random.default_rng(0))
    forest.chain(3, -1)
    mask = np.array([[1, 0, 1, 1]], np.bool_)
    with pytest.raises(InputError, match="row 0 sees 3 rows, expected 4: itself and all that"):
        forest.engine.recent.new_rows(Forward(np.array([1]), np.array([3]), mask, np.arange(0)))


def test_keeping_nothing_starts_again():
    forest = Forest(np.random.default_rng(0))
    forest.chain(200, -1)
    forest.keep([])
    assert (forest.engine.recent.num_recent, forest.engine.recent.num_checkpoints) == (0, 1)
    forest.chain(200, -1)
