"""Which rows of a path are folded into a checkpoint: chains of rows with one child each.

The choice affects only the cost, not the results; see ``recent_paths``.
"""

from collections.abc import Set

from dsbd_forward.rows import Ints

FOLDED_TOGETHER = 32
"""The fewest rows that are folded: the cost of a fold depends mainly on the size of the states."""

STAY_RECENT = 16
"""This many last rows of a path are not folded, 1 or more: drafts are rarely longer."""

MOST_LEFT = 128
"""If a path is longer, even a short chain is folded, even if short paths branch off at its end."""


def foldable_chains(
    rows: Ints, parents: Ints, depths: Ints, stops: Set[int]
) -> list[tuple[list[int], list[int]]]:
    """Return the chains to fold: the rows of each, and the rows that continue from it.

    rows: (n,) int64, rows of the cache after checkpoints, parents before children.
    parents, depths: (N,) int64, parent and depth of every row of the cache.
    stops: rows at which a chain must end, if it has them.
    """
    trees: dict[int, list[int]] = {}  # rows of each tree, by root
    root_of: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for row in rows.tolist():
        parent = int(parents[row])
        root = root_of[row] = root_of.get(parent, row)
        trees.setdefault(root, []).append(row)
        children.setdefault(parent, []).append(row)
    deepest: dict[int, int] = {}  # depth of the deepest row below each, or its own
    for row in reversed(root_of):
        depth = int(depths[row])
        deepest[row] = max(map(deepest.__getitem__, children.get(row, ())), default=depth)
    chains = []
    for root, tree in trees.items():
        last_depth = deepest[root] - STAY_RECENT
        chain = [root]
        while len(below := children.get(chain[-1], [])) == 1:
            chain += below
        num_long = sum(deepest[child] >= depths[chain[-1]] + STAY_RECENT for child in below)
        chain = [row for row in chain if depths[row] <= last_depth]
        is_long = len(chain) >= FOLDED_TOGETHER or num_long > 1
        if chain and (is_long or deepest[root] - depths[root] >= MOST_LEFT):
            stop = next((place for place, row in enumerate(chain) if row in stops), None)
            chain = chain[: None if stop is None else stop + 1]
            folded = set(chain)
            chains.append((chain, [row for row in tree if row not in folded]))
    return chains
