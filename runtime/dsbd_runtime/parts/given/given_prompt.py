"""Given prompt: the source of a request whose prompt has rows without tokens, such as sound.

A row is *given* if its embedding is an output of an encoder. Its token is a placeholder, which is
never read. The encoder runs once for each *piece*: a window of sound, or a picture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import LateSource, Source
from dsbd_forward.rows import Ints
from dsbd_runtime.errors import InputError

_NOT_GIVEN = -1


class GivenPiece:
    """The inputs of one run of an encoder.

    labels: the most probable CTC labels, (T,) int64, once an encoder with CTC logits has read the
        piece.
    """

    def __init__(self, inputs: Mapping[str, NDArray[Any]], num_rows: int) -> None:
        """Copy the encoder's inputs by name; InputError: numbers that are not finite.

        num_rows: number of rows that the encoder returns, at least 1.
        """
        if num_rows < 1:
            raise InputError(f"a piece of a prompt has {num_rows} rows, expected at least 1")
        self.num_rows = num_rows
        self.labels: Ints | None = None
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
    """The given rows of a prompt. Two are equal if their pieces, places and positions are equal.

    So the same sound at the same places of a longer prompt is equal, as in a continued chat.

    end: the place after the last given row.
    """

    def __init__(
        self, places: Ints, pieces: Sequence[GivenPiece], positions: Ints | None = None
    ) -> None:
        """Take the rows of pieces, one piece after the other.

        places: (E,) int64, increasing. Place of each row in the prompt.
        positions: (A, end) int64, for an engine with several axes of positions: the positions of
            the prompt's tokens up to the last given row. Later tokens follow the largest of them.

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
        self.end = int(places[-1]) + 1
        if positions is not None and positions.shape[1:] != (self.end,):
            raise InputError(
                f"positions have shape {positions.shape}, expected (axes, {self.end}), those of "
                "the tokens up to the last given row"
            )
        self.pieces, self.positions = tuple(pieces), positions
        self._given = np.full((2, self.end), _NOT_GIVEN)  # by place, the piece and its row
        self._digests: list[bytes] = []  # digest of each piece with its places
        self._firsts: list[int] = []
        for piece, piece_places in zip(pieces, np.split(places, ends[:-1]), strict=True):
            self._given[0, piece_places] = len(self._firsts)
            self._given[1, piece_places] = np.arange(len(piece_places))
            self._digests.append(hashlib.sha256(piece.digest + piece_places.tobytes()).digest())
            self._firsts.append(int(piece_places[0]))
        whole = hashlib.sha256(b"".join(self._digests))
        if positions is not None:
            whole.update(f"{positions.shape}".encode() + np.ascontiguousarray(positions).tobytes())
        self._digest = whole.digest()

    @classmethod
    def at_placeholders(
        cls,
        token_ids: Sequence[int],
        placeholder_token_id: int,
        pieces: Sequence[GivenPiece],
        positions: Ints | None = None,
    ) -> GivenPrompt:
        """Return the prompt whose placeholders are the given rows."""
        return cls((np.array(token_ids) == placeholder_token_id).nonzero()[0], pieces, positions)

    @property
    def num_axes(self) -> int:
        return 1 if self.positions is None else len(self.positions)

    def num_alike(self, other: Source) -> int:
        """See LateSource: rows before the first piece that only one has, or at another place."""
        theirs = other if isinstance(other, GivenPrompt) else None
        both = (self, theirs) if theirs else (self,)
        pairs = zip_longest(self._digests, theirs._digests if theirs else ())
        number = next((n for n, (own, their) in enumerate(pairs) if own != their), len(self.pieces))
        firsts = [first for each in both for first in each._firsts[number : number + 1]]
        places = np.arange(min(firsts, default=self.end))
        others = places if theirs is None else theirs.on_axes(places, theirs.num_axes)
        is_other = (self.on_axes(places, self.num_axes) != others).any(axis=0)
        return int(is_other.argmax()) if is_other.any() else len(places)

    def given_among(self, positions: Ints) -> tuple[Ints, Ints, Ints]:
        """Return which of the nodes at these positions, (n,), are given.

        Returns three arrays (E,) int64: the nodes, the piece of each, its row in the piece.
        """
        nodes = (positions < self.end).nonzero()[0]
        pieces, rows = self._given[:, positions[nodes]]
        is_given = pieces != _NOT_GIVEN
        return nodes[is_given], pieces[is_given], rows[is_given]

    def on_axes(self, positions: Ints, num_axes: int) -> Ints:
        """Return the positions of nodes, (n,), on every axis: (A, n).

        Positions [[0, 1, 1], [0, 1, 2]] of a prompt with ``end`` 3 place node 3 at 3 on both axes.
        """
        axes = np.tile(positions, (num_axes, 1))
        if self.positions is not None:
            is_inside = positions < self.end
            axes[:, is_inside] = self.positions[:, positions[is_inside]]
            axes[:, ~is_inside] += int(self.positions.max()) + 1 - self.end
        return axes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GivenPrompt) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        num_rows = int((self._given[0] != _NOT_GIVEN).sum())
        return (
            f"GivenPrompt({len(self.pieces)} pieces, {num_rows} rows from place {self._firsts[0]})"
        )
