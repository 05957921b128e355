"""Preemption: the cache rows of a request are dropped, and computed again when it goes on.

All else that a request has (its forest, distributions, hypotheses and randomness) stays as it is,
so no token of it changes, whatever its strategy. The rows of a feature draft come from features of
the target, most of which are not kept: they are computed along with the target's rows.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.features import ZEROS, Features, ParentFeatures
from dsbd_forward.forward import Forward, ForwardResult
from dsbd_ort.decoding.cache_view import CacheView
from dsbd_ort.decoding.engine_call import EngineCall, EngineCalls, Role
from dsbd_ort.decoding.kv_cache import PREFILL_CHUNK, PrefixCache, Rows
from dsbd_ort.decoding.node_features import NO_FEATURES, FeatureNeeds, align_prefixes

_NO_LOGITS = np.arange(0)
_NO_ROW = -1


class PreemptedRows:
    """UsedRows of a view that was preempted: what they held, and those computed again so far.

    They are numbered anew, by position. Every slot sees a path: one row at each position from 0 to
    its own. So a row sees, of any slot that sees it, the rows before it: with the slots

        0b0011, 0b0111, 0b1011

    and the positions 0, 1, 2, 2 of the rows, the last one sees the rows 0 and 1.

    tokens, positions: (num_rows,) int64.
    prefix: the tokens of the prompt's rows that are in the cache again.
    """

    def __init__(self, view: CacheView) -> None:
        """Drop the rows of an open view."""
        rows = view.used().nonzero()[0]
        tokens, positions = view.row_cache.recorded(rows)
        order = positions.argsort(kind="stable")
        self.view = view
        self.tokens, self.positions = tokens[order], positions[order]
        seen = view.hide(rows[order])  # (num_slots, num_rows)
        self._seen = np.packbits(seen, axis=1, bitorder="little")
        self._slots = seen.argmax(axis=0)  # (num_rows,), one that sees the row
        self._prompt = view.prefix
        self._rows: Rows = np.arange(0)
        self.num_rows = len(rows)
        self.prefix = PrefixCache(source=view.prefix.source)
        view.row_cache.remove(view)

    def used(self) -> NDArray[np.bool_]:
        is_used = np.zeros(self.view.row_cache.model.num_rows, dtype=np.bool_)
        is_used[self._rows] = True
        return is_used

    def renumber(self, kept: Rows, new_rows: Rows) -> None:
        self._rows = new_rows[self._rows]
        self._show_prefix()

    def compute(self, role: Role) -> EngineCalls[None]:
        """Compute the rows again, without logits, or share those that another request has."""
        self.begin(self.reusable())
        while self.num_left:
            yield self.next_call(role, PREFILL_CHUNK)
        self.end()

    def reusable(self) -> PrefixCache:
        """Return the rows of the prompt that another request has."""
        return self.view.row_cache.longest_prefix(self._prompt.identity)

    def begin(self, prefix: PrefixCache) -> None:
        self._rows = prefix.rows
        self._show_prefix()
        self.view.row_cache.add(self)

    @property
    def num_left(self) -> int:
        """Rows that are not computed again yet, those of the highest positions."""
        return self.num_rows - len(self._rows)

    def next_call(
        self, role: Role, most_rows: int, features: FeatureNeeds = NO_FEATURES
    ) -> EngineCall:
        """Return the call that computes the next rows, at most ``most_rows`` of them."""
        start, source = len(self._rows), self._prompt.source
        chunk = np.arange(start, min(start + most_rows, self.num_rows))
        tokens, positions = self.tokens[chunk], self.positions[chunk]

        def forward_at(first_row: int) -> Forward:
            mask = self._append(chunk, first_row)
            self._show_prefix()
            return Forward(tokens, positions, mask, _NO_LOGITS, *features, source=source)

        return EngineCall(role, self.view.meter, len(chunk), forward_at, source, is_prefill=True)

    def _append(self, chunk: Rows, first_row: int) -> NDArray[np.bool_]:
        end = int(chunk[-1]) + 1
        seen = np.unpackbits(self._seen[self._slots[chunk]], axis=1, count=end, bitorder="little")
        seen &= self.positions[:end] < self.positions[chunk][:, None]
        if self.view.spec.reads_features:
            seen[:, self.positions[:end] == 0] = False  # see CacheView
        seen[np.arange(len(chunk)), chunk] = True
        self._rows = np.append(self._rows, first_row + np.arange(len(chunk)))
        mask = np.zeros((len(chunk), first_row + len(chunk)), dtype=np.bool_)
        mask[:, self._rows] = seen
        return mask

    def _show_prefix(self) -> None:
        self.prefix = dataclasses.replace(self._prompt, rows=self._rows)
        self.prefix.shorten(min(len(self._rows), len(self._prompt.tokens)))

    def end(self) -> None:
        """Give the rows back to the view."""
        view = self.view
        view.row_cache.remove(self)
        view.row_cache.add(view)
        self._prompt.rows = self.prefix.rows  # the object that is left to the next request
        view.prefix = self._prompt
        bits = np.zeros((len(self._seen), view.row_cache.model.num_rows), dtype=np.bool_)
        seen = np.unpackbits(self._seen, axis=1, count=self.num_rows, bitorder="little")
        bits[:, self._rows] = seen
        view.show(bits)

    def parents(self) -> Rows:
        """Return the parent of every row, (num_rows,) int64: ``_NO_ROW`` if it is not seen."""
        parents = np.full(self.num_rows, _NO_ROW)
        for slot in np.unique(self._slots).tolist():
            path = self._path(slot)
            rows = (self._slots == slot).nonzero()[0]
            places = self.positions[path].searchsorted(self.positions[rows] - 1)
            candidates = path.take(places, mode="clip")
            is_parent = self.positions[candidates] == self.positions[rows] - 1
            parents[rows[is_parent]] = candidates[is_parent]
        return parents

    def slots_by_row(self) -> dict[int, int]:
        """Return the slot of every row that is a live node's."""
        paths = {slot: self._path(slot) for slot in range(1, len(self._seen))}
        return {int(path[-1]): slot for slot, path in paths.items() if len(path)}

    def _path(self, slot: int) -> Rows:
        bits = np.unpackbits(self._seen[slot], count=self.num_rows, bitorder="little")
        return bits.nonzero()[0]


class Preemption:
    """The rows that a live request has given up, and their computation once it is resumed.

    Attributes:
        rows: by engine, until they are computed again.
        wanted: the engine call that the computation waits for; None before it begins.
    """

    def __init__(self, views: dict[Role, CacheView]) -> None:
        """Drop the rows of open views."""
        self.rows = {role: PreemptedRows(view) for role, view in views.items()}
        self.wanted: EngineCall | None = None
        self._views = views
        self._calls = self._compute()

    def begin(self) -> bool:
        """Begin to compute the rows; return whether none is left, as other requests have them."""
        return self.advance(None)

    def advance(self, result: ForwardResult | None) -> bool:
        """Go on with the result of the wanted call; return whether all rows are there again."""
        try:
            # A generator that has not started takes no result.
            self.wanted = self._calls.send(result)  # type: ignore[arg-type]
        except StopIteration:
            return True
        return False

    def interrupt(self) -> None:
        """Drop the rows that are there again."""
        self._calls.close()
        self._calls, self.wanted = self._compute(), None
        for role, view in self._views.items():
            if role in self.rows:
                view.row_cache.close_view(self.rows[role])
            else:
                self.rows[role] = PreemptedRows(view)

    def _compute(self) -> EngineCalls[None]:
        draft = self.rows.get("draft")
        if draft is not None and draft.view.own_features is not None:
            yield from RecomputedPair(self.rows["target"], draft).compute()
            self.rows.clear()
        for role in self._views:
            if role in self.rows:
                yield from self.rows[role].compute(role)
                del self.rows[role]


class RecomputedPair:
    """The rows of a request with a feature draft, computed again side by side, by position.

    A row of the draft comes from the same as before: from an own feature, which the request has
    kept, or from the feature of the target's row of its parent, which has the same path of tokens.
    """

    def __init__(self, target: PreemptedRows, draft: PreemptedRows) -> None:
        own_of = draft.view.own_features
        assert own_of is not None  # the caller has looked
        self._target, self._draft = target, draft
        self._target_paths, self._draft_parents = _paths(target, draft)
        self._own = {
            row: place
            for row, slot in draft.slots_by_row().items()
            if (place := own_of(slot)) is not None
        }
        self._of_target: dict[int, tuple[Features, int]] = {}  # by path

    def compute(self) -> EngineCalls[None]:
        target, draft = self._target, self._draft
        of_target, of_draft = target.reusable(), draft.reusable()
        align_prefixes(of_target, of_draft)
        if of_target.tokens and of_target.feature is not None:  # that of the last row, if it counts
            path = self._target_paths[len(of_target.tokens) - 1]
            if of_target.feature.num_tokens == len(of_target.tokens):
                self._of_target[path] = of_target.feature.feature, 0
        target.begin(of_target)
        draft.begin(of_draft)
        while target.num_left:
            start = target.num_rows - target.num_left
            num_rows = min(target.num_left, PREFILL_CHUNK)
            needs = FeatureNeeds(np.arange(num_rows), None)
            result = yield target.next_call("target", num_rows, needs)
            self._note(start, num_rows, result)
            yield from self._compute_draft()
        yield from self._compute_draft()
        assert not draft.num_left
        target.end()
        draft.end()

    def _note(self, start: int, num_rows: int, result: ForwardResult) -> None:
        """Note the features of rows of the target; forget those that no row needs any more."""
        assert result.features is not None  # the call has asked for them
        first = self._draft.num_rows - self._draft.num_left
        needed = set(self._draft_parents[first:])
        self._of_target = {path: place for path, place in self._of_target.items() if path in needed}
        for index, path in enumerate(self._target_paths[start : start + num_rows]):
            if path in needed:
                self._of_target[path] = result.features, result.first_feature + index

    def _compute_draft(self) -> EngineCalls[None]:
        """Compute the next rows of the draft whose features are there."""
        draft = self._draft
        while draft.num_left:
            places = list(self._next_places())
            if not places:
                return
            needs = FeatureNeeds(None, _parents_at(places))
            yield draft.next_call("draft", len(places), needs)

    def _next_places(self) -> Iterator[tuple[Features, int] | None]:
        """Yield what the next rows of the draft come from, as far as it is there."""
        first = self._draft.num_rows - self._draft.num_left
        for row in range(first, min(first + PREFILL_CHUNK, self._draft.num_rows)):
            if not self._draft.positions[row]:
                yield None
                continue
            place = self._own.get(row) or self._of_target.get(self._draft_parents[row])
            if place is None:
                return
            yield place


def _paths(target: PreemptedRows, draft: PreemptedRows) -> tuple[list[int], list[int]]:
    """Return the path of every row of the target, and that of the parent of every draft's row.

    A path is a number: that of the pair of its parent's path and its token, as it was met first.
    """
    numbers: dict[tuple[int, int], int] = {}
    paths: list[list[int]] = []
    for rows in (target, draft):
        path_numbers: list[int] = []
        for parent, token, position in zip(
            rows.parents().tolist(), rows.tokens.tolist(), rows.positions.tolist(), strict=True
        ):
            above = path_numbers[parent] if parent >= 0 else 0 if position else _NO_ROW
            path_numbers.append(numbers.setdefault((above, token), len(numbers)))
        paths.append(path_numbers)
    above = [
        paths[1][parent] if parent >= 0 else 0  # the first row is that of path 0, seen by none
        for parent in draft.parents().tolist()
    ]
    return paths[0], above


def _parents_at(places: list[tuple[Features, int] | None]) -> ParentFeatures:
    """Return these places of features; None is that of no parent."""
    forwards: dict[int, Features] = {}
    sources, rows = np.full(len(places), ZEROS), np.zeros(len(places), dtype=np.int64)
    numbers: dict[int, int] = {}
    for index, place in enumerate(places):
        if place is not None:
            features, rows[index] = place
            sources[index] = numbers.setdefault(id(features), len(numbers))
            forwards[id(features)] = features
    return ParentFeatures(tuple(forwards.values()), sources, rows)
