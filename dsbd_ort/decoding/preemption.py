"""Preemption: the cache rows of a request are dropped, and computed again when it goes on.

All else that a request has (its forest, the distributions of the nodes, its hypotheses and
randomness) stays as it is, so no token of it changes, whatever its strategy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.cache_view import CacheView, PrefixCache, Rows
from dsbd_ort.decoding.kv_cache import PREFILL_CHUNK
from dsbd_ort.decoding.step_model import EngineCall, EngineCalls, Role

_NO_LOGITS = np.arange(0)


class PreemptedRows:
    """The rows of a view that was preempted: what they held, and those computed again so far.

    They are numbered anew, by position. Every slot sees a path: one row at each position from 0 to
    its own. So a row sees, of any slot that sees it, the rows before it: with the slots

        0b0011, 0b0111, 0b1011

    and the positions 0, 1, 2, 2 of the rows, the last one sees the rows 0 and 1.

    Attributes:
        num_rows: how many there were.
        prefix: the tokens of the prompt's rows that are in the cache again.
    """

    def __init__(self, view: CacheView) -> None:
        """Drop the rows of an open view."""
        rows = view.used().nonzero()[0]
        tokens, positions = view.kv.told(rows)
        order = positions.argsort(kind="stable")
        self._view = view
        self._tokens, self._positions = tokens[order], positions[order]
        seen = view.hide(rows[order])  # (num_slots, num_rows)
        self._seen = np.packbits(seen, axis=1, bitorder="little")
        self._slots = seen.argmax(axis=0)  # (num_rows,), one that sees the row
        self._prompt = view.prefix.tokens
        self._rows: Rows = np.arange(0)
        self.num_rows = len(rows)
        self.prefix = PrefixCache()
        view.kv.remove(view)

    def close(self) -> None:
        """Give up the rows that were computed again."""
        self._view.kv.close_view(self)

    def used(self) -> NDArray[np.bool_]:
        """See UsedRows."""
        is_used = np.zeros(self._view.kv.model.num_rows, dtype=np.bool_)
        is_used[self._rows] = True
        return is_used

    def renumber(self, kept: Rows, new_rows: Rows) -> None:
        """See UsedRows."""
        self._rows = new_rows[self._rows]
        self._show_prefix()

    def compute(self, role: Role) -> EngineCalls[None]:
        """Compute the rows again, but for those of the prompt that another request has; no logits.

        After the last call the view is what it was.
        """
        kv = self._view.kv
        self._rows = kv.longest_prefix(self._prompt).rows
        self._show_prefix()
        kv.add(self)
        for start in range(len(self._rows), self.num_rows, PREFILL_CHUNK):
            chunk = np.arange(start, min(start + PREFILL_CHUNK, self.num_rows))

            def mask(first_row: int, chunk: Rows = chunk) -> NDArray[np.bool_]:
                return self._append(chunk, first_row)

            tokens, positions = self._tokens[chunk], self._positions[chunk]
            meter = self._view.meter
            yield EngineCall(role, meter, tokens, positions, _NO_LOGITS, mask, is_prefill=True)
            self._show_prefix()
        self._restore()

    def _append(self, chunk: Rows, first_row: int) -> NDArray[np.bool_]:
        """Add the next rows; return their mask."""
        end = int(chunk[-1]) + 1
        seen = np.unpackbits(self._seen[self._slots[chunk]], axis=1, count=end, bitorder="little")
        seen &= self._positions[:end] < self._positions[chunk][:, None]
        seen[np.arange(len(chunk)), chunk] = True
        self._rows = np.append(self._rows, first_row + np.arange(len(chunk)))
        mask = np.zeros((len(chunk), first_row + len(chunk)), dtype=np.bool_)
        mask[:, self._rows] = seen
        return mask

    def _show_prefix(self) -> None:
        rows = self._rows[: len(self._prompt)]
        self.prefix = PrefixCache(self._prompt[: len(rows)], rows)

    def _restore(self) -> None:
        """Give the rows back to the view."""
        view = self._view
        view.kv.remove(self)
        view.kv.add(view)
        view.prefix = self.prefix
        num_slots = len(self._seen)
        bits = np.zeros((num_slots, view.kv.model.num_rows), dtype=np.bool_)
        seen = np.unpackbits(self._seen, axis=1, count=self.num_rows, bitorder="little")
        bits[:, self._rows] = seen
        view.show(bits)
