"""One request's rows of an engine's key/value cache, and which of them each of its nodes sees."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.features import Features
from dsbd_forward.forward import Forward
from dsbd_ort.decoding.engine_call import EngineCall, Meter
from dsbd_ort.decoding.kv_cache import PrefixCache, Rows, SharedKVCache


class CacheView:
    """UsedRows: one request's rows of an engine's cache, and which of them each of its nodes sees.

    A node that was computed has a *slot*; slot 0 sees the prompt. Visibility is packed: bit c of a
    slot says whether it sees row c of the cache, lowest first. With the prompt in the rows 0 and 1,
    a node in row 2 and its child in row 4 (row 3 is another's) the slots are

        0b00011, 0b00111, 0b10111

    No other row of a feature draft sees that of the prompt's first token, which has no parent and
    so comes from no feature: such drafts are trained without it.

    num_slots: slots in use, slot 0 included.
    num_rows_at_end: rows that it held when it ended.
    own_features: of a feature draft: returns the feature of its own that a slot's row comes from,
        None if it is the target's.
    """

    own_features: Callable[[int], tuple[Features, int] | None] | None = None

    def __init__(self, row_cache: SharedKVCache, prefix: PrefixCache) -> None:
        """Open a view that begins with the rows of ``prefix``, which is kept valid."""
        self.row_cache = row_cache
        self.spec = row_cache.model.spec
        self.prefix = prefix
        self.meter = Meter()
        self.num_rows_at_end = 0
        self._hides_first = self.spec.reads_features
        self._seen = np.zeros((64, 32), dtype=np.uint8)  # (slot capacity, bytes)
        self.num_slots = 1
        row_cache.open_view(self)

    @property
    def num_rows(self) -> int:
        seen = np.bitwise_or.reduce(self._seen[: self.num_slots])
        return max(int(np.unpackbits(seen).sum()), len(self.prefix.tokens))

    def begin(self) -> None:
        """Let slot 0 see the prompt, whose rows are all there."""
        self._reserve(0, self.row_cache.model.num_rows)
        self._seen[0] = 0
        is_seen = np.zeros(self.row_cache.model.num_rows, dtype=np.bool_)
        is_seen[self.prefix.rows[1 if self._hides_first else 0 :]] = True
        packed = np.packbits(is_seen, bitorder="little")
        self._seen[0, : len(packed)] = packed

    def append_prompt(self, num_tokens: int, first_row: int) -> NDArray[np.bool_]:
        """Add the next tokens of the prompt; return the mask of their rows, which are the last."""
        rows = self.prefix.rows[: len(self.prefix.tokens)]
        mask = np.zeros((num_tokens, first_row + num_tokens), dtype=np.bool_)
        mask[:, rows] = True
        mask[:, first_row:] = np.tri(num_tokens, dtype=np.bool_)
        self.prefix.rows = np.append(rows, np.arange(first_row, first_row + num_tokens))
        if self._hides_first:
            mask[0 if len(rows) else 1 :, self.prefix.rows[0]] = False
        return mask

    def append(self, parent_slots: NDArray[np.int64], first_row: int) -> NDArray[np.bool_]:
        """Add nodes, whose slots and rows are the next ones; return their mask.

        parent_slots: (S,) int64. The slot of each node's parent, which may be a new one.
        first_row: row of the first. Returns (S, first_row + S) bool.
        """
        size, first = len(parent_slots), self.num_slots
        num_rows = first_row + size
        if first + size > self._seen.shape[0] or num_rows > 8 * self._seen.shape[1]:
            self._reserve(size, num_rows)
        self.num_slots += size
        own_bits = _remembered_own_bits if size <= _FEW_ROWS else _own_bits
        own_seen, begin = own_bits(size, first_row & 7), first_row >> 3
        seen = self._seen.take(parent_slots, axis=0)
        seen_of_own = seen[:, begin : begin + own_seen.shape[1]]
        if not size or parent_slots[parent_slots.argmax()] < first:
            seen_of_own |= own_seen
        else:
            is_new = parent_slots >= first
            seen[is_new] = 0
            seen_of_own |= own_seen
            # Among the new nodes, the parent, or the node itself if that is none of them.
            above = np.where(is_new, parent_slots - first, np.arange(size))
            while True:  # twice as many ancestors in every round
                seen |= seen.take(above, axis=0)
                farther = above[above]
                if not len((farther != above).nonzero()[0]):
                    break
                above = farther
        self._seen[first : self.num_slots] = seen
        mask = _unpacked(seen, num_rows)
        if self._hides_first and not len(self.prefix.rows):
            for root in (parent_slots == 0).nonzero()[0].tolist():  # the prompt's one token, if new
                row = first_row + root
                self._seen[first : self.num_slots, row >> 3] &= 255 ^ (1 << (row & 7))
                mask[:, row] = False
                mask[root, row] = True
        return mask

    def forget_own_rows(self, slots: NDArray[np.int64]) -> None:
        """Let the slots see what the parents of their nodes do: no longer their own rows."""
        bits = _unpacked(self._seen[slots], 8 * self._seen.shape[1])
        last_row = bits.shape[1] - 1 - bits[:, ::-1].argmax(axis=1)  # the last row that each sees
        bits[np.arange(len(slots)), last_row] = False
        self._seen[slots] = np.packbits(bits, axis=1, bitorder="little")

    def keep(self, slots: NDArray[np.int64]) -> None:
        """Keep slot 0 and these, (num_kept,) int64, which become 1, 2, ...; drop all others."""
        self._seen[1 : 1 + len(slots)] = self._seen.take(slots, axis=0)
        self.num_slots = 1 + len(slots)

    def end(self, agreed_tokens: list[int]) -> None:
        """Leave to the next request the rows that all slots see; free the others.

        agreed_tokens: from position 0 on, those that all paths share.
        """
        self.num_rows_at_end = self.num_rows
        seen = self._seen[min(1, self.num_slots - 1) : self.num_slots]
        seen_by_all = _unpacked(np.bitwise_and.reduce(seen)[None], self.row_cache.model.num_rows)[0]
        if self._hides_first:
            seen_by_all[self.prefix.rows[:1]] = True
            seen_by_all &= len(self.prefix.rows) > 0
        self.prefix.rows = seen_by_all.nonzero()[0]
        self.prefix.tokens = agreed_tokens[: len(self.prefix.rows)]
        self.prefix.shorten(len(self.prefix.tokens))
        self.num_slots = 1
        self._seen[0] = 0  # the prefix is all that is left

    def begin_again(self, num_dropped: int, num_begin: int) -> EngineCall | None:
        """Return the call that computes a draft's rows again, with fewer positions before them.

        The rows of the next ``num_dropped`` positions after ``num_begin`` begin tokens are dropped,
        and later rows have positions that are lower by as many. The slots see the new rows once the
        call is made; None: no row is left.
        """
        rows = self.used().nonzero()[0]
        tokens, positions = self.row_cache.recorded(rows)
        is_kept = (positions < num_begin) | (positions >= num_begin + num_dropped)
        order = positions.argsort(kind="stable")
        order = order[is_kept[order]]
        positions = positions[order] - num_dropped * (positions[order] >= num_begin)
        tokens, seen, num_rows = tokens[order], self._bits()[:, rows[order]], len(order)
        sees = seen[seen.argmax(axis=0)] & (positions < positions[:, None])
        sees[np.arange(num_rows), np.arange(num_rows)] = True
        prefix = [*self.prefix.tokens[:num_begin], *self.prefix.tokens[num_begin + num_dropped :]]

        if not num_rows:
            self.prefix.tokens = prefix
            self.show(np.zeros((self.num_slots, 0), dtype=np.bool_))
            return None

        def forward_at(first_row: int) -> Forward:
            mask = np.zeros((num_rows, first_row + num_rows), dtype=np.bool_)
            mask[:, first_row:] = sees
            bits = np.zeros((self.num_slots, first_row + num_rows), dtype=np.bool_)
            bits[:, first_row:] = seen
            self.show(bits)
            self.prefix.tokens = prefix
            self.prefix.rows = first_row + np.arange(len(prefix))
            source = self.prefix.source
            return Forward(tokens, positions, mask, np.arange(0), source=source)

        return EngineCall(
            "draft", self.meter, num_rows, forward_at, self.prefix.source, is_prefill=True
        )

    def used(self) -> NDArray[np.bool_]:
        num_rows = self.row_cache.model.num_rows
        self._reserve(0, num_rows)
        seen = np.bitwise_or.reduce(self._seen[: self.num_slots])
        is_used: NDArray[np.bool_] = _unpacked(seen[None], num_rows)[0]
        is_used[self.prefix.rows[: len(self.prefix.tokens)]] = True
        return is_used

    def renumber(self, kept: Rows, new_rows: Rows) -> None:
        self.prefix.rows = new_rows[self.prefix.rows[: len(self.prefix.tokens)]]
        bits = _unpacked(self._seen[: self.num_slots], len(new_rows))
        self.show(bits[:, kept])

    def hide(self, rows: Rows) -> NDArray[np.bool_]:
        """Return which of ``rows`` each slot sees, (num_slots, num_rows) bool; see none now."""
        bits = self._bits()
        self._seen = np.zeros((self.num_slots, 32), dtype=np.uint8)
        return bits[:, rows]

    def _bits(self) -> NDArray[np.bool_]:
        """Return which rows of the cache each slot sees, (num_slots, num_rows) bool."""
        bits = _unpacked(self._seen[: self.num_slots], self.row_cache.model.num_rows)
        bits[0, self.prefix.rows[: len(self.prefix.tokens)]] = True
        return bits

    def show(self, bits: NDArray[np.bool_]) -> None:
        """Let every slot see these rows of the cache, (num_slots, n) bool, and no others."""
        self._reserve(0, bits.shape[1])
        if self._hides_first:
            bits[:, self.prefix.rows[:1]] = False
        packed = np.packbits(bits, axis=1, bitorder="little")
        self._seen[: self.num_slots] = 0
        self._seen[: self.num_slots, : packed.shape[1]] = packed

    def _reserve(self, num_more_slots: int, num_rows: int) -> None:
        slots, size = self._seen.shape
        num_slots = self.num_slots + num_more_slots
        if num_slots <= slots and num_rows <= 8 * size:
            return
        more_slots = max(slots, 2 * num_slots if num_slots > slots else 0)
        more_bytes = max(size, num_rows // 4 if num_rows > 8 * size else 0)
        larger = np.zeros((more_slots, more_bytes), dtype=np.uint8)
        larger[: self.num_slots, :size] = self._seen[: self.num_slots]
        self._seen = larger


_FEW_ROWS = 64


def _own_bits(num_rows: int, shift: int) -> NDArray[np.uint8]:
    """Return the bits by which new rows see themselves, beginning at bit ``shift`` of a byte."""
    bits = np.eye(num_rows, num_rows + shift, shift, dtype=np.bool_)
    return np.packbits(bits, axis=1, bitorder="little")


_remembered_own_bits = lru_cache(maxsize=8 * _FEW_ROWS)(_own_bits)


def _unpacked(packed: NDArray[np.uint8], num_bits: int) -> NDArray[np.bool_]:
    """Return the first bits of every row, lowest first: (num_packed, num_bits) bool."""
    return np.unpackbits(packed, 1, num_bits, "little").view(np.bool_)  # keywords are slow
