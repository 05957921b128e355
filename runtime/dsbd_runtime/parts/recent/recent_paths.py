"""Recent rows of an engine with convolutions or recurrences, and the checkpoints before them.

Such layers keep only *recent* rows (docs/algorithm.md 3.11). A path is folded piece by piece from
its beginning. The rows up to its *checkpoint* become one state of each recurrent layer; the rows
after the checkpoint are recent rows. All paths begin at checkpoint 0. With folded rows in brackets,

    0 [a b c] 1 ── d ── e ── f         d to f continue from checkpoint 1, whose last row is c
                         └── g

A new row can continue from any recent row, and from the last row of a checkpoint. If a path
branches off at another folded row, the rows after the last checkpoint above it are computed again.
So the choice of rows to fold, and of the time, affects only the cost:

* A chain of rows with one child each is folded as soon as it is long. The last rows of its path
  are not folded, because they may be drafted rows that are dropped. A short chain is folded if
  several branches at its end have grown long, which rejected drafts do not.
* Some checkpoints stay for paths that branch off later, such as prompts with a common beginning:
  at least one every time that a path has doubled its length, and where rows were computed again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import NO_ROW, Forward
from dsbd_forward.rows import Ints
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.attention.attention_rows import num_in_place, places_of_rows
from dsbd_runtime.parts.recent.fold_chains import foldable_chains

MOST_HELD = 4
"""Checkpoints that stay for paths that branch off later."""

_FIRST_HELD = 256  # rows; fewer rows are quickly computed again
_LOOK_EVERY = 16  # the fewest new recent rows before the next look for chains
_BEGIN = 0  # the checkpoint where paths begin
_FOLDED = -1  # instead of a checkpoint: nothing continues from the row
_NUM_FIELDS = 6


def _field(number: int) -> Any:
    return property(lambda self: self._table[number, : self.num_rows])


class RecentMemory(Protocol):
    """The memory of the recent rows and of the states of the checkpoints."""

    def reserve(self, num_rows: int, num_used: int) -> None:
        """Make room for ``num_rows`` recent rows; keep the first ``num_used``. 0: start again."""

    def shrink(self, num_used: int) -> None:
        """Free the room of recent rows that a call after ``num_used`` of them does not need."""

    def move_rows(self, src_rows: Ints, first_row: int) -> None:
        """Copy these recent rows to ``first_row`` and the rows after it, as if at once."""

    def reserve_checkpoints(self, number: int) -> None:
        """Have exactly ``number`` checkpoints; keep the present ones. The first state is zero."""

    def fold(self, rows: Ints, source: int, target: int) -> None:
        """Compute the state of ``target`` from that of ``source`` and these recent rows."""


@dataclass(eq=False, slots=True)
class NewRows:
    """The S rows of one engine call before they are appended, and its inputs (``recent_rows``).

    parents: (S,) int64. The parent's row of the cache, ``NO_ROW`` where the path begins.
    depths: (S,) int64. The length of the path to each row, itself included.
    checkpoints: (S,) int64. The checkpoint that each row continues from.
    again: (S,) int64. Rows of the cache that the call computes again; None: it appends its rows.
    first_row: the recent row of the first of the S rows.
    ancestors: (S, A) int64 recent rows; None without convolutions.
    mask: (S, n) bool. Which of the first n recent rows each row sees; it sees no others.
    first_checkpoint: the checkpoint whose state is the first one in the call.
    checkpoint_rows, row_places: (B, L) and (S,) int64.
    """

    forward: Forward
    parents: Ints
    depths: Ints
    checkpoints: Ints
    again: Ints | None
    first_row: int
    ancestors: Ints | None
    mask: NDArray[np.bool_]
    first_checkpoint: int
    checkpoint_rows: Ints
    row_places: Ints


class RecentPaths:
    """Table of the rows of the cache: which are recent, and from which ones paths can continue.

    num_recent: number of places in use among the recent rows, including those of dropped rows.

    The table has for each row its token and position, and:

    * the parent's row, ``NO_ROW`` where the path begins;
    * its depth, which is the length of the path including itself;
    * its place among the recent rows, or ``NO_ROW``;
    * the checkpoint that a child would continue from, ``_FOLDED`` if the row can have no child.
    """

    # Columns of the table for the rows in use, (num_rows,) int64 each.
    _tokens, _positions, _parents, _depths, _places, _checkpoints = map(_field, range(_NUM_FIELDS))

    def __init__(self, memory: RecentMemory, num_ancestors: int) -> None:
        """Take the memory; ``num_ancestors``: rows that a convolution reads, 0: no convolutions."""
        self._memory = memory
        self._num_ancestors = num_ancestors
        self._table = np.zeros((_NUM_FIELDS, 256), np.int64)
        self._ends = [0]  # depth of the last row of every checkpoint
        self._held: list[int] = []  # rows of the cache from which paths may continue; oldest first
        self._next_look = 0
        self.num_rows = 0
        self.num_recent = 0

    @property
    def num_checkpoints(self) -> int:
        return len(self._ends)

    def truncate(self, num_rows: int) -> None:
        """Forget the rows from ``num_rows`` on, which a failed forward has appended."""
        self.num_rows = min(num_rows, self.num_rows)
        self._held = [row for row in self._held if row < self.num_rows]

    def keep(self, rows: Ints) -> None:
        """Keep these rows of the cache, increasing; drop all others."""
        new_rows = np.full(self.num_rows + 1, NO_ROW)  # NO_ROW finds the last
        new_rows[rows] = np.arange(len(rows))
        self._table[:, : len(rows)] = self._table.take(rows, axis=1)
        self.num_rows = len(rows)
        self._parents[:] = new_rows[self._parents]
        self._held = [new for row in self._held if (new := int(new_rows[row])) != NO_ROW]
        if not len(rows):
            self.num_recent, self._ends = 0, [0]
            self._memory.reserve(0, 0)
        self._give_up(set())
        self._drop_unneeded()

    # Calls

    def prepare(self, forward: Forward) -> None:
        """Fold chains where it pays, before a call; the rows that it continues from stay."""
        if self.num_recent >= self._next_look:
            self._fold_chains(self._continued(forward))
            self._look_later()

    def again(self, forward: Forward, most_rows: int) -> Iterator[tuple[Forward, Ints]]:
        """Yield calls that compute again the folded rows that a forward needs.

        With each call: the rows of the cache that it computes. The call writes them after the rows
        in use, where later calls may overwrite them.
        """
        for row in self._continued(forward).tolist():
            if self._checkpoints[row] != _FOLDED:
                continue
            path = self._path(row)
            is_unfolded = self._checkpoints[path] != _FOLDED
            begin = len(path) - int(is_unfolded[::-1].argmax()) if is_unfolded.any() else 0
            for start in range(begin, len(path), most_rows):
                stop = min(start + most_rows, len(path))
                yield self._forward_again(path[:stop], start), path[start:stop]
            self._hold(row)

    def _forward_again(self, path: Ints, start: int) -> Forward:
        rows = path[start:]
        mask = np.zeros((len(rows), self.num_rows + len(rows)), np.bool_)
        mask[:, path] = np.arange(len(path)) < start + np.arange(len(rows))[:, None]
        mask[:, self.num_rows :] = np.eye(len(rows), dtype=np.bool_)
        return Forward(self._tokens[rows], self._positions[rows], mask, np.arange(0))

    def new_rows(self, forward: Forward, again: Ints | None = None) -> NewRows:
        """Return the rows of a call; InputError: one does not see the whole path to its parent."""
        num_new = forward.num_new
        above = forward.ancestors(max(1, self._num_ancestors))
        parents = above[:, -1]
        depths = forward.mask.sum(axis=1)
        checkpoints = self._continued_checkpoints(forward, again)
        self._check_paths(parents, depths)
        assert (checkpoints != _FOLDED).all()  # see ``again``
        self._memory.reserve(self.num_recent + num_new, self.num_recent)
        if again is not None:
            self._places[again] = self.num_recent + np.arange(num_new)
        places = np.append(self._places, [*range(self.num_recent, self.num_recent + num_new), -1])
        ancestors = places[above] if self._num_ancestors else None  # NO_ROW finds the last
        first = int(checkpoints.min())
        rows = places_of_rows(checkpoints - first, int(checkpoints.max()) - first + 1)
        inputs = self.num_recent, ancestors, self._mask(forward, checkpoints), first, *rows
        assert ancestors is None or ((ancestors < 0) == (above < 0)).all()
        return NewRows(forward, parents, depths, checkpoints, again, *inputs)

    def append(self, new: NewRows) -> None:
        num_new = new.forward.num_new
        self._reserve(num_new)
        if new.again is None:
            first, self.num_rows = self.num_rows, self.num_rows + num_new
            self._tokens[first:] = new.forward.token_ids
            self._positions[first:] = new.forward.positions
            self._parents[first:], self._depths[first:] = new.parents, new.depths
            self._places[first:] = self.num_recent + np.arange(num_new)
            self._checkpoints[first:] = new.checkpoints
        else:
            self._checkpoints[new.again] = new.checkpoints
        self.num_recent += num_new

    def _continued(self, forward: Forward) -> Ints:
        rows = np.unique(self._last_seen(forward))
        rows_seen: Ints = rows[rows != NO_ROW]
        return rows_seen

    def _last_seen(self, forward: Forward) -> Ints:
        """Return the last row of the cache that each new row sees, (S,) int64, or ``NO_ROW``."""
        seen = forward.mask[:, : self.num_rows]
        if not self.num_rows:
            return np.full(forward.num_new, NO_ROW)
        last = self.num_rows - 1 - seen[:, ::-1].argmax(axis=1)
        return np.where(seen[np.arange(len(seen)), last], last, NO_ROW)

    def _continued_checkpoints(self, forward: Forward, again: Ints | None) -> Ints:
        continued = self._last_seen(forward)
        if again is not None:  # all continue from the same row, and the others from one another
            continued[:] = continued[0]
        checkpoints: Ints = np.append(self._checkpoints, _BEGIN)[continued]  # NO_ROW finds the last
        return checkpoints

    def _check_paths(self, parents: Ints, depths: Ints) -> None:
        of_parents = np.concatenate([self._depths, depths, [0]])[parents]  # NO_ROW finds the last
        wrong = depths != of_parents + 1
        if wrong.any():
            row = int(wrong.argmax())
            raise InputError(
                f"row {row} sees {depths[row]} rows, expected {of_parents[row] + 1}: itself and "
                "all that the row above it sees; an engine with convolutions or recurrences takes "
                "whole paths"
            )

    def _mask(self, forward: Forward, checkpoints: Ints) -> NDArray[np.bool_]:
        num_new, first = forward.num_new, self.num_recent
        mask = np.zeros((num_new, first + num_new), np.bool_)
        recent = (self._places >= 0).nonzero()[0]
        ends = np.array(self._ends)[checkpoints]
        is_after = self._depths[recent] > ends[:, None]
        mask[:, self._places[recent]] = forward.mask[:, recent] & is_after
        mask[:, first:] |= forward.mask[:, self.num_rows :]
        return mask

    # Folds

    def _fold_chains(self, continued: Ints) -> None:
        """Fold the beginning of long paths; paths can still continue from ``continued`` rows."""
        stops = {*continued.tolist(), *self._held}
        has_folded = False
        while chains := foldable_chains(self._unfolded(), self._parents, self._depths, stops):
            for chain, below in chains:
                self._fold(chain, below, stops)
            has_folded = True
        if has_folded:
            self._drop_unneeded()

    def _look_later(self) -> None:
        self._next_look = self.num_recent + max(_LOOK_EVERY, self.num_recent // 4)

    def _fold(self, chain: list[int], below: list[int], stops: set[int]) -> None:
        """Fold a chain into a checkpoint; the rows ``below`` continue from it from now on."""
        source, end = int(self._checkpoints[chain[0]]), int(self._parents[chain[0]])
        before, depth = self._ends[source], int(self._depths[chain[-1]])
        self._checkpoints[[*chain, *below]] = _FOLDED
        has_doubled = before.bit_length() < depth.bit_length()
        if end != NO_ROW and before >= _FIRST_HELD and has_doubled:
            self._hold(end)
        self._give_up(stops)
        target = self._unused_checkpoint()
        self._memory.reserve_checkpoints(len(self._ends))
        self._memory.fold(self._places[chain], source, target)
        self._ends[target] = depth
        self._checkpoints[[chain[-1], *below]] = target

    def _give_up(self, stops: set[int]) -> None:
        """Let no path continue from an inner row of a path, except for ``stops`` and held rows."""
        continued = {*self._checkpoints[self._unfolded()].tolist()}
        for row in self._last_rows().tolist():
            is_alone = int(self._checkpoints[row]) not in continued
            if is_alone and row not in stops and row not in self._held:
                if (self._parents == row).any():
                    self._checkpoints[row] = _FOLDED

    def _unused_checkpoint(self) -> int:
        """Return the first number from which no row continues, a new one if all are in use."""
        used = {*np.unique(self._checkpoints).tolist(), _BEGIN}
        number = next(n for n in range(len(self._ends) + 1) if n not in used)
        if number == len(self._ends):
            self._ends.append(0)
        return number

    def _hold(self, row: int) -> None:
        self._held = [*(held for held in self._held if held != row), row][-MOST_HELD:]

    def _last_rows(self) -> Ints:
        is_unfolded = self._checkpoints >= 0
        ends = np.array(self._ends)[np.where(is_unfolded, self._checkpoints, 0)]
        last_rows: Ints = (is_unfolded & (self._depths == ends)).nonzero()[0]
        return last_rows

    def _unfolded(self) -> Ints:
        """Return the rows of the cache after their checkpoint; its last row is not among them."""
        is_unfolded = self._checkpoints >= 0
        ends = np.array(self._ends)[np.where(is_unfolded, self._checkpoints, 0)]
        unfolded: Ints = (is_unfolded & (self._depths > ends)).nonzero()[0]
        return unfolded

    def _drop_unneeded(self) -> None:
        """Drop the recent rows that no new row could read, and the checkpoints without rows."""
        is_needed = np.zeros(self.num_rows, np.bool_)
        is_needed[self._unfolded()] = True
        rows = (self._checkpoints >= 0).nonzero()[0]
        for _ in range(self._num_ancestors):
            is_needed[rows] = True
            rows = np.unique(self._parents[rows])
            rows = rows[rows != NO_ROW]
        self._places[~is_needed] = NO_ROW
        needed = is_needed.nonzero()[0]
        needed = needed[self._places[needed].argsort()]
        places = self._places[needed]
        if (in_place := num_in_place(places)) < len(places):
            self._memory.move_rows(places[in_place:], in_place)
        self._places[needed] = np.arange(len(needed))
        self.num_recent = len(needed)
        self._memory.shrink(self.num_recent)
        self._look_later()
        num_used = int(self._checkpoints.max(initial=_BEGIN)) + 1
        del self._ends[num_used:]
        self._memory.reserve_checkpoints(num_used)

    # The table

    def _path(self, row: int) -> Ints:
        path = [row]
        while (parent := int(self._parents[path[-1]])) != NO_ROW:
            path.append(parent)
        return np.array(path[::-1])

    def _reserve(self, num_more: int) -> None:
        end = self.num_rows + num_more
        if end > self._table.shape[1]:
            larger = np.zeros((_NUM_FIELDS, 2 * end), np.int64)
            larger[:, : self.num_rows] = self._table[:, : self.num_rows]
            self._table = larger
