"""Recurrences and convolutions over paths against the plain recurrence of each path, in float64."""

from __future__ import annotations

from pathlib import Path as FilePath

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsbd_export.capture.cache_graphs import write_fold_graph
from dsbd_export.capture.path_recurrences import (
    Checkpoints,
    PastRows,
    PathRows,
    Recurrence,
    path_outputs,
)
from dsbd_export.capture.replacements import ReplaceTorchFunctions
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity_engine import see_rows
from dsbd_export.parts.rows import PathConvolutions
from dsbd_forward.forward import Forward
from dsbd_runtime.parts.attention.cache_entries import RecurrentRows
from tests.ort_sessions import cpu_session

CAPACITY = 96
KEY_HEADS, HEADS, KEY_WIDTH, WIDTH = 2, 4, 8, 6
PARENTS = [-1, -1, 0, 0, 1, 2, 2, 5]


class Path:
    """The matrix of one path, token by token, in float64."""

    def __init__(self):
        self.state = torch.zeros(HEADS, KEY_WIDTH, WIDTH, dtype=torch.float64)

    def step(self, recurrence: Recurrence, row: int) -> Tensor:
        """The output of a token, (HEADS, WIDTH); the matrix changes."""
        query, key = (
            each[:, row].double().repeat_interleave(HEADS // KEY_HEADS, 0)
            for each in (recurrence.query, recurrence.key)
        )
        self.state = self.state * recurrence.decay[:, row].double().exp()[:, None, None]
        delta = recurrence.value[:, row].double()
        if recurrence.rate is not None:
            read = torch.einsum("hkv,hk->hv", self.state, key)
            delta = recurrence.rate[:, row].double()[:, None] * (delta - read)
        self.state = self.state + key[:, :, None] * delta[:, None]
        return torch.einsum("hkv,hk->hv", self.state, query)

    def copy(self) -> Path:
        other = Path()
        other.state = self.state.clone()
        return other


def drawn(num_rows: int, seed: int, *, has_rate: bool, decay: float = 1.0, alike=0.0):
    """A random recurrence; its keys are ``alike`` to one another up to 1, where all are one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    key = normal(KEY_HEADS, num_rows, KEY_WIDTH) * (1 - alike) + alike
    return Recurrence(
        query=normal(KEY_HEADS, num_rows, KEY_WIDTH),
        key=F.normalize(key, dim=-1),
        value=normal(HEADS, num_rows, WIDTH),
        decay=-decay * torch.rand(HEADS, num_rows, generator=generator),
        rate=torch.rand(HEADS, num_rows, generator=generator) if has_rate else None,
    )


def part(recurrence: Recurrence, rows: list[int]) -> Recurrence:
    parts = (getattr(recurrence, name) for name in ("query", "key", "value", "decay", "rate"))
    return Recurrence(*(None if each is None else each[:, rows] for each in parts))


class Forest:
    """Rows in a cache that is full of noise where nothing was written, and two checkpoints.

    The first is where all paths begin; the other one is noise until something is folded.
    """

    def __init__(self, capacity: int = CAPACITY):
        self.capacity = capacity
        widths = ((KEY_HEADS, KEY_WIDTH), (HEADS, WIDTH), (HEADS, 2))
        self.cache = tuple(torch.randn(1, heads, capacity, width) for heads, width in widths)
        self.states = torch.randn(2, HEADS, KEY_WIDTH, WIDTH)
        self.decays = torch.randn(2, HEADS, 2)
        self.states[0] = self.decays[0] = 0

    def call(self, recurrence: Recurrence, mask: np.ndarray, first_row: int, after=()) -> Tensor:
        """Outputs of the new rows, (HEADS, S, WIDTH), each after the checkpoint ``after``."""
        after = after or [0] * len(mask)
        groups = [[row for row, at in enumerate(after) if at == each] for each in (0, 1)]
        most = max(map(len, groups))
        filled = [[*group, *[0] * (most - len(group))] for group in groups]
        places = [at * most + groups[at].index(row) for row, at in enumerate(after)]
        checkpoints = Checkpoints(torch.tensor(filled), torch.tensor(places))
        rows = PathRows(torch.from_numpy(mask), torch.tensor([first_row]), checkpoints)

        def scatter(past: Tensor, new: Tensor) -> Tensor:
            present = past.clone()
            present[:, :, first_row : first_row + new.shape[2]] = new
            return present

        past = PastRows(self.cache, self.states, self.decays)
        found, self.cache = path_outputs(recurrence, rows, past, scatter)
        return found

    def chain(self, recurrence: Recurrence, first_row: int) -> Tensor:
        num_rows = recurrence.value.shape[1]
        parents = np.arange(-1, num_rows - 1)
        return self.call(recurrence, see_rows(parents, first_row, self.capacity)[0], first_row)

    def fold(self, rows: list[int], session: onnxruntime.InferenceSession, before: int = 0) -> None:
        """Make the second checkpoint of rows after ``before``; they become noise."""
        names = (f"past_key_values.0.recurrent_{name}" for name in ("key", "delta", "decay"))
        inputs = dict(zip(names, (part.numpy() for part in self.cache), strict=True))
        inputs |= {
            "folded_rows": np.array(rows),
            "state.0": self.states[before : before + 1].numpy(),
            "state_decay.0": self.decays[before : before + 1].numpy(),
        }
        state, decay = session.run(["folded_state.0", "folded_state_decay.0"], inputs)
        self.states[1], self.decays[1] = torch.from_numpy(state[0]), torch.from_numpy(decay[0])
        for part in self.cache:
            part[:, :, rows] = torch.randn(())


@pytest.fixture(scope="module")
def fold_session(tmp_path_factory):
    file: FilePath = tmp_path_factory.mktemp("fold") / "fold.onnx"
    shape = {"num_heads": HEADS, "num_key_heads": KEY_HEADS, "most_new_rows": 64, "dtype": "fp32"}
    entry = RecurrentRows(layer=0, value_width=WIDTH, key_width=KEY_WIDTH, **shape)
    write_fold_graph([entry], file)
    return cpu_session(file)


@pytest.mark.parametrize("has_rate", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_in_parts_and_a_tree_below_it(seed, has_rate):
    """Rows 0 to 29 are a prompt in two calls, the next eight a tree, the last three below it."""
    prompt, below = 30, [-1, 0, 0]  # the second tree goes on below node 5 of the first
    whole = drawn(prompt + len(PARENTS) + len(below), seed, has_rate=has_rate)
    forest = Forest()
    found = [
        forest.chain(part(whole, list(range(20))), 0),
        forest.chain(part(whole, list(range(20, prompt))), 20),
    ]
    tree = list(range(prompt, prompt + len(PARENTS)))
    mask, _ = see_rows(np.array(PARENTS), prompt, CAPACITY)
    found.append(forest.call(part(whole, tree), mask, prompt))
    first = prompt + len(PARENTS)
    second, _ = see_rows(np.array(below), first, CAPACITY)
    second[:, :first] = mask[5, :first]
    found.append(forest.call(part(whole, list(range(first, first + len(below)))), second, first))

    path, wanted, paths = Path(), [], {}
    for row in range(prompt):
        wanted.append(path.step(whole, row))
    for node, parent in enumerate(PARENTS):
        paths[node] = (path if parent < 0 else paths[parent]).copy()
        wanted.append(paths[node].step(whole, prompt + node))
    seconds = {}
    for node, parent in enumerate(below):
        seconds[node] = (paths[5] if parent < 0 else seconds[parent]).copy()
        wanted.append(seconds[node].step(whole, first + node))
    torch.testing.assert_close(
        torch.cat(found, dim=1).double(), torch.stack(wanted, dim=1), atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("has_rate", [True, False])
@pytest.mark.parametrize("decay", [0.01, 1.0])
def test_after_a_checkpoint_all_is_the_same(fold_session, has_rate, decay):
    """A path of 50 rows is folded in two steps up to row 44; a tree grows below it.

    Its first root is after the checkpoint, with the rows that are left; its second is another
    path, from the beginning.
    """
    prompt, folded = 50, 45
    whole = drawn(prompt + len(PARENTS), 4, has_rate=has_rate, decay=decay)
    forest, path = Forest(), Path()
    forest.chain(part(whole, list(range(30))), 0)
    forest.fold(list(range(20)), fold_session)
    mask, _ = see_rows(np.arange(-1, prompt - 31), 30, CAPACITY)
    mask[:, :20] = False
    forest.call(part(whole, list(range(30, prompt))), mask, 30, [1] * (prompt - 30))
    forest.fold(list(range(20, folded)), fold_session, before=1)

    mask, _ = see_rows(np.array(PARENTS), prompt, CAPACITY)
    roots = [0, 1, 0, 0, 1, 0, 0, 0]
    mask[:, :folded] = False
    mask[np.array(roots) == 1, :prompt] = False
    tree = list(range(prompt, prompt + len(PARENTS)))
    found = forest.call(part(whole, tree), mask, prompt, [1 - root for root in roots])
    for row in range(prompt):
        path.step(whole, row)
    paths, wanted = {}, []
    for node, parent in enumerate(PARENTS):
        paths[node] = (paths[parent] if parent >= 0 else Path() if node else path).copy()
        wanted.append(paths[node].step(whole, prompt + node))
    torch.testing.assert_close(found.double(), torch.stack(wanted, dim=1), atol=2e-5, rtol=0)


@pytest.mark.parametrize("decay", [0.01, 1.0, 30.0])
def test_decays_far_down_a_path_keep_their_digits(decay):
    """After 1,500 tokens the logarithm has up to five digits before the point."""
    whole, forest, path = drawn(1504, 7, has_rate=True, decay=decay), Forest(1536), Path()
    found = [
        forest.chain(part(whole, list(range(start, min(start + 64, 1504)))), start)
        for start in range(0, 1504, 64)
    ]
    wanted = torch.stack([path.step(whole, row) for row in range(1504)], dim=1)
    torch.testing.assert_close(torch.cat(found, dim=1).double(), wanted, atol=1e-4, rtol=0)


def test_a_token_that_repeats_is_solved():
    """Equal keys, rates near 1, no decay: the powers of this system overflow."""
    whole = drawn(64, 3, has_rate=True, decay=1e-4, alike=1.0)
    whole = Recurrence(whole.query, whole.key, whole.value, whole.decay, whole.rate * 0 + 0.999)
    path = Path()
    wanted = torch.stack([path.step(whole, row) for row in range(64)], dim=1)
    torch.testing.assert_close(Forest().chain(whole, 0).double(), wanted, atol=2e-4, rtol=0)


def rows_above(parents, first_row, number):
    """Return the last rows of the path to each node, (S, number), -1 before the path begins.

    With parents [-1, -1, 0], first_row 1 and number 2: [[-1, 0], [-1, 0], [0, 1]].
    """
    rows = np.zeros((len(parents), number), np.int64)
    for node, parent in enumerate(parents):
        if parent < 0:
            rows[node] = np.arange(first_row - number, first_row)
        else:
            rows[node] = [*rows[parent, 1:], first_row + parent]
    return np.maximum(rows, -1)


@given(st.integers(0, 2**32 - 1), st.integers(1, 24), st.integers(0, 9), st.integers(1, 6))
def test_the_ancestors_of_a_forward_are_those_of_the_tree(seed, num_nodes, first_row, number):
    rng = np.random.default_rng(seed)
    parents = np.array([rng.integers(-1, node) for node in range(num_nodes)])
    mask, positions = see_rows(parents, first_row, first_row + num_nodes)
    ids = np.zeros(num_nodes, np.int64)
    forward = Forward(ids, positions, mask, np.arange(0))
    wanted = rows_above(parents, first_row, number)
    assert np.array_equal(forward.ancestors(number), wanted)
    assert np.array_equal(forward.parents, wanted[:, -1])


@pytest.mark.parametrize("size", [2, 3, 7])
def test_a_convolution_reads_the_path(size):
    torch.manual_seed(0)
    channels, prompt = 5, 4
    weight, bias = torch.randn(channels, 1, size), torch.randn(channels)
    states = torch.randn(channels, prompt + len(PARENTS))
    new = states[None, :, prompt:]
    ancestors = torch.from_numpy(rows_above(np.array(PARENTS), prompt, 6))
    convolutions = PathConvolutions(ancestors)
    convolutions.read(states.t()[None, None], new)
    with ReplaceTorchFunctions({F.conv1d: convolutions.convolved}):
        found = F.conv1d(new, weight, bias, padding=size - 1, groups=channels)
    for node in range(len(PARENTS)):
        path, above = [prompt + node], node
        while (above := PARENTS[above]) >= 0:
            path.insert(0, prompt + above)
        path = [*range(prompt), *path]
        wanted = F.conv1d(states[None, :, path], weight, bias, padding=size - 1, groups=channels)
        torch.testing.assert_close(found[0, :, node], wanted[0, :, len(path) - 1])


@pytest.mark.parametrize(
    ("size", "groups", "words"),
    [
        (3, 1, "a convolution"),
        (8, 5, "a convolution"),
        (3, 5, "reads inputs that are in no cache"),
    ],
)
def test_another_convolution_or_one_that_no_cache_knows_is_refused(size, groups, words):
    convolutions = PathConvolutions(torch.zeros(2, 2, dtype=torch.int64))
    states = torch.zeros(1, 5, 2)
    if (size, groups) != (3, 5):
        convolutions.read(states.transpose(1, 2)[:, None], states)
    weight = torch.zeros(5, 5 // groups, size)
    with (
        ReplaceTorchFunctions({F.conv1d: convolutions.convolved}),
        pytest.raises(ExportError, match=words),
    ):
        F.conv1d(states, weight, padding=size - 1, groups=groups)
