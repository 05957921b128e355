"""Time and memory of tries, each in a separate process."""

import statistics
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from dsbd_ort.constraints import TokenTrie
from lab.frame.own_process import in_own_process

_ROUNDS = 200


@dataclass(frozen=True)
class TrieCosts:
    """Costs of one trie.

    Attributes:
        num_nodes: number of nodes, including the root.
        build_s: seconds to build it from an array.
        build_bytes: peak memory of building it, without the array.
        num_bytes: bytes of the trie, which are also those of its file.
        map_s: seconds to map it from its file.
        step_us: microseconds to advance the states of all beams and list the allowed tokens, at
        each
            depth: the median.
        num_allowed: number of listed tokens at each depth.
    """

    num_nodes: int
    build_s: float
    build_bytes: int
    num_bytes: int
    map_s: float
    step_us: tuple[float, ...]
    num_allowed: tuple[int, ...]


def trie_costs(num_items: int, num_tokens: int, num_codes: int, num_beams: int) -> TrieCosts:
    """Return the costs of a trie of random items: their tokens are uniform and independent."""
    return in_own_process(_costs, num_items, num_tokens, num_codes, num_beams)


def _costs(num_items: int, num_tokens: int, num_codes: int, num_beams: int) -> TrieCosts:
    rng = np.random.default_rng(0)
    items = rng.integers(0, num_codes, (num_items, num_tokens), dtype=np.int32)
    begin = time.perf_counter()
    trie = TokenTrie.from_array(items)
    build_s = time.perf_counter() - begin
    tracemalloc.start()
    TokenTrie.from_array(items)
    build_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "items.trie"
        trie.save(file)
        begin = time.perf_counter()
        trie = TokenTrie.load(file)
        map_s = time.perf_counter() - begin
        steps = [_step(trie, items, depth, num_beams, rng) for depth in range(num_tokens)]
    return TrieCosts(
        num_nodes=trie.num_nodes,
        build_s=build_s,
        build_bytes=build_bytes,
        num_bytes=trie.num_bytes,
        map_s=map_s,
        step_us=tuple(microseconds for microseconds, _ in steps),
        num_allowed=tuple(count for _, count in steps),
    )


def _step(
    trie: TokenTrie,
    items: np.typing.NDArray[np.int32],
    depth: int,
    num_beams: int,
    rng: np.random.Generator,
) -> tuple[float, int]:
    """Return the median microseconds of a step at a depth, and of its number of allowed tokens."""
    seconds, counts = [], []
    for _ in range(_ROUNDS):
        rows = items[rng.integers(0, len(items), num_beams)].astype(np.int64)
        states = np.zeros(num_beams, dtype=np.int64)
        for before in range(depth):
            states = trie.advance(states, rows[:, before])
        begin = time.perf_counter()
        states = trie.advance(states, rows[:, depth])
        allowed = trie.allowed(states)
        trie.accepts(states)
        trie.has_ended(states)
        seconds.append(time.perf_counter() - begin)
        counts.append(len(allowed.tokens))
    return 1e6 * statistics.median(seconds), int(statistics.median(counts))
