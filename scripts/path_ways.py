"""Logits of one path computed in many ways, compared bit for bit.

Each way is random: the rows per call, rows of other paths between them, places in the cache, the
cache's capacity, the content of other rows, the requested logits, and the number of threads.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward
from dsbd_runtime.bundle_files.manifest import ModelEntry
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.ort.ort_module import import_ort, session_options
from dsbd_runtime.parts.attention.attention_rows import (
    ATTENTION_MASK,
    ATTENTION_MASK_SLIDING,
    INPUT_IDS,
    POSITION_IDS,
    WRITE_INDICES,
)
from dsbd_runtime.parts.attention.cache_entries import (
    num_ancestors,
    parts_of,
    past_name,
    present_name,
    recent,
    recurrent,
)
from dsbd_runtime.parts.head.head import LOGIT_ROWS, LOGITS
from dsbd_runtime.parts.recent.recent_rows import (
    ANCESTORS,
    CHECKPOINT_ROWS,
    RECENT_MASK,
    RECENT_WRITE_INDICES,
    ROW_PLACES,
)

CAPACITIES = (128, 256, 384, 512)
THREADS = (1, 2)
_ERROR_LOG_LEVEL = 3


@dataclass(frozen=True)
class Way:
    """One way to compute a path.

    Attributes:
        chunks: number of path rows in each call.
        neighbours: number of rows of other paths in each call.
        gaps: number of cache rows left out before each call.
        capacity: rows of the caches.
        threads: threads of the session.
    """

    chunks: list[int]
    neighbours: list[int]
    gaps: list[int]
    capacity: int
    threads: int

    @classmethod
    def plain(cls, num_tokens: int) -> Way:
        """Return the way with one call, one thread and the smallest caches."""
        capacity = next(size for size in CAPACITIES if size >= num_tokens)
        return cls([num_tokens], [0], [0], capacity, 1)

    @classmethod
    def drawn(cls, num_tokens: int, rng: np.random.Generator) -> Way:
        """Return a random way: one row at a time, trees, or large chunks."""
        largest = int(rng.choice([1, 2, 8, num_tokens]))
        chunks: list[int] = []
        while (left := num_tokens - sum(chunks)) > 0:
            chunks.append(min(left, int(rng.integers(1, largest + 1))))
        room = CAPACITIES[-1] - num_tokens
        neighbours = rng.integers(0, rng.choice([1, 4, 12]), len(chunks))
        neighbours = np.where(np.cumsum(neighbours) < room // 2, neighbours, 0)
        gaps = np.where(rng.random(len(chunks)) < 0.2, rng.integers(0, 90, len(chunks)), 0)
        gaps = np.where(np.cumsum(gaps) < room // 2, gaps, 0)
        needed = num_tokens + int(neighbours.sum() + gaps.sum())
        capacity = int(rng.choice([size for size in CAPACITIES if size >= needed]))
        threads = int(rng.choice(THREADS))
        return cls(chunks, neighbours.tolist(), gaps.tolist(), capacity, threads)


@dataclass(frozen=True)
class PathCall:
    """One call: rows of a path, and rows of other paths among them.

    Attributes:
        token_ids, positions: (S,) int64. Tokens of other paths are random.
        rows: (S,) int64. Rows of the cache.
        mask: (S, C) bool.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    mask: NDArray[np.bool_]

    @classmethod
    def drawn(
        cls,
        path_tokens: NDArray[np.int64],
        path_rows: NDArray[np.int64],
        path: NDArray[np.int64],
        rows: range,
        *,
        num_columns: int,
        vocab_size: int,
        rng: np.random.Generator,
    ) -> PathCall:
        """Return a call with the path's next rows; other rows branch off from the path.

        path_tokens: (n,), tokens of the whole path. path_rows: cache rows of the path so far. path:
        places of its next rows in the call. rows: consecutive rows of the cache for the call.
        """
        num_before, num_rows = len(path_rows), len(rows)
        here = np.array(rows, np.int64)
        all_path_rows = np.concatenate([path_rows, here[path]])
        positions = rng.integers(0, num_before + np.searchsorted(path, np.arange(num_rows)) + 1)
        positions[path] = num_before + np.arange(len(path))
        token_ids = rng.integers(0, vocab_size, num_rows)
        token_ids[path] = path_tokens[num_before : num_before + len(path)]
        mask = np.zeros((num_rows, num_columns), np.bool_)
        for row, position in enumerate(positions):
            mask[row, all_path_rows[:position]] = True
            mask[row, here[row]] = True
        return cls(token_ids, positions, here, mask)


class PathEngine:
    """An engine, opened with one and with two threads, that computes a path in any way."""

    def __init__(self, model_file: Path, entry: ModelEntry) -> None:
        ort = import_ort()
        self._entry = entry
        self.vocab_size = entry.vocab_size
        self._sessions: dict[int, Any] = {}
        for threads in THREADS:
            options = session_options(ort, entry, EngineSettings(num_threads=threads))
            options.log_severity_level = _ERROR_LOG_LEVEL
            self._sessions[threads] = ort.InferenceSession(
                str(model_file), options, providers=["CPUExecutionProvider"]
            )

    def logits(
        self, token_ids: NDArray[np.int64], way: Way, rng: np.random.Generator
    ) -> NDArray[np.float32]:
        """Return the logits after every token of the path, (n, V)."""
        caches = {
            (cache.layer, part): rng.standard_normal(cache.shape(part, way.capacity), np.float32)
            for cache, part in parts_of(self._entry.caches)
        }
        row_positions = np.full(way.capacity, -1)
        path_rows = np.arange(0)
        logits = []
        first_row = 0
        for chunk, num_neighbours, gap in zip(way.chunks, way.neighbours, way.gaps, strict=True):
            first_row += gap
            path = np.sort(rng.choice(chunk + num_neighbours, chunk, replace=False))
            call = PathCall.drawn(
                token_ids, path_rows, path, range(first_row, first_row + chunk + num_neighbours),
                num_columns=way.capacity, vocab_size=self.vocab_size, rng=rng,
            )  # fmt: skip
            row_positions[call.rows] = call.positions
            others = rng.random(len(call.rows)) < 0.3
            wanted = np.concatenate([path, np.flatnonzero(others)])
            outputs = self._run(way, call, row_positions, wanted, caches)
            logits.append(outputs[:chunk])
            path_rows = np.concatenate([path_rows, call.rows[path]])
            first_row += len(call.rows)
        return np.concatenate(logits)

    def _run(
        self,
        way: Way,
        call: PathCall,
        row_positions: NDArray[np.int64],
        logit_rows: NDArray[np.int64],
        caches: dict[tuple[int, str], NDArray[np.float32]],
    ) -> NDArray[np.float32]:
        """Run one call; ``caches`` get the new rows."""
        window = self._entry.sliding_window or way.capacity
        near = call.mask & (call.positions[:, None] - row_positions < window)
        mask_by_name = {ATTENTION_MASK: call.mask, ATTENTION_MASK_SLIDING: near}
        inputs = {
            INPUT_IDS: call.token_ids[None],
            POSITION_IDS: call.positions[None],
            WRITE_INDICES: call.rows[:1],
            LOGIT_ROWS: logit_rows,
            **{name: mask_by_name[name][None, None] for name in self._entry.masks},
            **{past_name(*key): cache for key, cache in caches.items()},
        }
        forward = Forward(
            call.token_ids, call.positions, call.mask[:, : call.rows[-1] + 1], logit_rows
        )
        ancestors = forward.ancestors(num_ancestors(self._entry.caches))
        inputs |= recent_inputs(self._entry, call.mask, ancestors, int(call.rows[0]))
        names = [LOGITS, *(present_name(*key) for key in caches)]
        logits, *present = self._sessions[way.threads].run(names, inputs)
        caches.update(zip(caches, present, strict=True))
        return np.asarray(logits)


def recent_inputs(
    entry: ModelEntry, mask: NDArray[np.bool_], ancestors: NDArray[np.int64], first_row: int
) -> dict[str, NDArray[Any]]:
    """Return the inputs of recent rows; all rows continue from the beginning of their paths.

    mask: (S, M) bool, for the recent rows. ancestors: (S, A) int64. first_row: first new row.
    """
    if not recent(entry.caches):
        return {}
    inputs: dict[str, NDArray[Any]] = {RECENT_WRITE_INDICES: np.array([first_row])}
    if num_ancestors(entry.caches):
        inputs[ANCESTORS] = ancestors
    if entries := recurrent(entry.caches):
        inputs[RECENT_MASK] = mask[None, None]
        inputs[CHECKPOINT_ROWS] = np.arange(len(mask))[None]
        inputs[ROW_PLACES] = np.arange(len(mask))
        states = (state for each in entries for state in each.states.items())
        inputs |= {name: np.zeros((1, *shape), np.float32) for name, shape in states}
    return inputs


@dataclass(frozen=True)
class WayCount:
    """Counts of ways and logits that were compared with the plain way, and of differing ones."""

    num_ways: int = 0
    num_other_ways: int = 0
    num_logits: int = 0
    num_other_logits: int = 0

    def __add__(self, other: WayCount) -> WayCount:
        """Return the sums of the counts."""
        return WayCount(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def count_differing(
    engine: PathEngine, *, num_tokens: int, num_ways: int, seed: int = 0
) -> WayCount:
    """Compare the logits of one path in ``num_ways`` random ways with the plain way."""
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(0, engine.vocab_size, num_tokens)
    wanted = engine.logits(token_ids, Way.plain(num_tokens), rng)
    drawn = [Way.drawn(num_tokens, rng) for _ in range(num_ways)]
    count = WayCount()
    for way in drawn:
        others = np.count_nonzero(engine.logits(token_ids, way, rng) != wanted)
        count += WayCount(1, int(others > 0), wanted.size, int(others))
    return count
