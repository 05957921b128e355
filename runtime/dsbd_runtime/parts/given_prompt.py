"""Given prompt: the source of a request whose prompt has rows that are no tokens, such as sound.

A row is *given* if its embedding is an output of an encoder. Its token is a placeholder, which is
never read. The encoder runs once for each *piece*: a window of sound, or a picture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import LateSource, Source
from dsbd_forward.rows import Ints
from dsbd_runtime.errors import InputError

_NOT_GIVEN = -1


class GivenPiece:
    """One run of an encoder. Pieces are equal if its inputs are; its outputs are not compared."""

    def __init__(self, inputs: Mapping[str, NDArray[Any]], num_rows: int) -> None:
        """Copy the encoder's inputs by name; InputError: numbers that are not finite.

        num_rows: that the encoder returns, at least 1.
        """
        if num_rows < 1:
            raise InputError(f"a piece of a prompt has {num_rows} rows, expected at least 1")
        self.num_rows = num_rows
        self.inputs: dict[str, NDArray[Any]] = {}
        digest = hashlib.sha256(str(num_rows).encode())
        for name, values in sorted(inputs.items()):
            copied = np.array(values, order="C")
            if copied.dtype.kind not in "biuf" or not np.isfinite(copied).all():
                raise InputError(
                    f"{name} of a piece of a prompt has values that are no finite numbers; check "
                    "the sound or picture that it was made of"
                )
            copied.flags.writeable = False
            self.inputs[name] = copied
            digest.update(f"{name} {copied.dtype} {copied.shape} ".encode() + copied.tobytes())
        self.digest = digest.digest()


class GivenPrompt(LateSource):
    """The given rows of a prompt; equal if pieces, places and positions are.

    The same sound at the same places of a longer prompt is equal, so a chat may go on.

    first, end: places of the first given row, and after the last one.
    """

    def __init__(
        self, places: Ints, pieces: Sequence[GivenPiece], positions: Ints | None = None
    ) -> None:
        """Take the rows of pieces, one piece after the other.

        places: (E,) int64, increasing. Place of each row in the prompt.
        positions: (A, end) int64. Of an engine with several axes of positions, those of the
            prompt's tokens up to the last given row. Later tokens follow the largest of them.

        Raises InputError if these contradict each other.
        """
        ends = np.cumsum([piece.num_rows for piece in pieces], dtype=np.int64)
        places = np.array(places, np.int64)
        if not len(ends) or len(places) != ends[-1]:
            raise InputError(
                f"a prompt has {len(places)} places for given rows, but {len(pieces)} pieces with "
                f"{int(ends[-1]) if len(ends) else 0} rows; expected one place for each row, at "
                "least one"
            )
        if places[0] < 0 or (np.diff(places) < 1).any():
            raise InputError("the places of given rows are not increasing from 0 on")
        self.first, self.end = int(places[0]), int(places[-1]) + 1
        if positions is not None and positions.shape[1:] != (self.end,):
            raise InputError(
                f"positions have shape {positions.shape}, expected (axes, {self.end}), those of "
                "the tokens up to the last given row"
            )
        self.pieces, self.positions = tuple(pieces), positions
        self._row_by_place = np.full(self.end, _NOT_GIVEN)
        self._row_by_place[places] = np.arange(len(places))
        self._piece_by_row = np.repeat(np.arange(len(pieces)), np.diff(ends, prepend=0))
        self._first_row_by_piece = ends - np.diff(ends, prepend=0)
        of_pieces = np.split(places, ends[:-1])
        self._firsts = [int(each[0]) for each in of_pieces]
        self._digests = [
            hashlib.sha256(piece.digest + each.tobytes()).digest()
            for piece, each in zip(pieces, of_pieces, strict=True)
        ]
        whole = hashlib.sha256(b"".join(self._digests))
        if positions is not None:
            whole.update(f"{positions.shape}".encode() + np.ascontiguousarray(positions).tobytes())
        self._digest = whole.digest()

    @classmethod
    def at_placeholders(
        cls, token_ids: Sequence[int], placeholder_token_id: int, pieces: Sequence[GivenPiece]
    ) -> GivenPrompt:
        """Return the prompt whose placeholders are the given rows, with one axis of positions."""
        return cls((np.array(token_ids) == placeholder_token_id).nonzero()[0], pieces)

    @property
    def num_axes(self) -> int:
        return 1 if self.positions is None else len(self.positions)

    def num_alike(self, other: Source) -> int:
        """See LateSource: rows before the first piece that both do not have at the same places."""
        theirs = other if isinstance(other, GivenPrompt) else None
        num_alike = 0
        for own, their in zip(self._digests, theirs._digests if theirs else (), strict=False):
            if own != their:
                break
            num_alike += 1
        firsts = [
            each._firsts[num_alike]
            for each in (self, theirs)
            if each and len(each._firsts) > num_alike
        ]
        places = np.arange(min(firsts, default=self.end))
        others = places if theirs is None else theirs.on_axes(places, theirs.num_axes)
        is_other = (self.on_axes(places, self.num_axes) != others).any(axis=0)
        return int(is_other.argmax()) if is_other.any() else len(places)

    def given_among(self, positions: Ints) -> tuple[Ints, Ints, Ints]:
        """Return which of the nodes at these positions, (n,), are given.

        Returns three of (E,) int64: nodes, the piece of each, its row of the piece.
        """
        is_inside = positions < self.end
        rows = np.where(
            is_inside, self._row_by_place[np.where(is_inside, positions, 0)], _NOT_GIVEN
        )
        nodes = (rows >= 0).nonzero()[0]
        pieces = self._piece_by_row[rows[nodes]]
        return nodes, pieces, rows[nodes] - self._first_row_by_piece[pieces]

    def on_axes(self, positions: Ints, num_axes: int) -> Ints:
        """Return the positions of nodes, (n,), on every axis: (A, n).

        Positions [[0, 1, 1], [0, 1, 2]] of a prompt with ``end`` 3 place node 3 at 3 on both axes.
        """
        found = np.tile(positions, (num_axes, 1))
        if self.positions is not None:
            is_inside = positions < self.end
            found[:, is_inside] = self.positions[:, positions[is_inside]]
            found[:, ~is_inside] += int(self.positions.max()) + 1 - self.end
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GivenPrompt) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        num_rows = len(self._piece_by_row)
        return f"GivenPrompt({len(self.pieces)} pieces, {num_rows} rows from place {self.first})"
