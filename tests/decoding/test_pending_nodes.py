"""Nodes that an engine has yet to compute: a walk up to the first computed one, by few steps."""

import numpy as np
import pytest

from dsbd_ort.decoding.forest import NO_NODE, NOT_COMPUTED, Forest


def random_forest(rng: np.random.Generator, num_nodes: int, trunk: int) -> Forest:
    """Return a forest that begins with a chain, after which any node may go on."""
    forest = Forest(0, 0, 0, (), [])
    forest._reserve(num_nodes)
    forest._num_nodes = num_nodes
    parents = [i - 1 if i < trunk else int(rng.integers(0, i)) for i in range(num_nodes)]
    parents[0] = NO_NODE
    forest.parents[:num_nodes] = parents
    return forest


def pending_by_walking(parents: np.ndarray, slots: np.ndarray, nodes: np.ndarray) -> list[int]:
    found = set()
    for node in nodes.tolist():
        while node != NO_NODE and slots[node] < 0:
            found.add(node)
            node = int(parents[node])
    return sorted(found)


@pytest.mark.parametrize("seed", range(60))
def test_pending_nodes_are_those_of_a_walk_over_the_parents(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(1, 60))
    trunk = int(rng.integers(1, num_nodes + 1))
    forest = random_forest(rng, num_nodes, trunk)
    assert forest.trunk_length >= trunk
    chain = [NO_NODE, *range(num_nodes - 1)][: forest.trunk_length]
    assert forest.parents[: forest.trunk_length].tolist() == chain
    slots = forest.slots[0]
    slots[:num_nodes] = np.where(rng.random(num_nodes) < rng.random(), 1, NOT_COMPUTED)
    if seed % 2:  # of a draft that rests: computed up to some node, nothing below
        slots[:num_nodes] = np.where(np.arange(num_nodes) < rng.integers(0, 5), 1, NOT_COMPUTED)
    nodes = rng.choice(num_nodes, size=int(rng.integers(1, num_nodes + 1)), replace=False)
    expected = pending_by_walking(forest.parents, slots, nodes)
    found = forest.pending(nodes, slots).tolist()
    assert sorted(found) == expected
