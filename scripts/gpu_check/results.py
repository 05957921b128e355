"""What became of the pieces: one JSON file each, so that a later call goes on where this ended."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DONE, FAILED, NOT_RUN = "done", "failed", "not run"


class PieceError(Exception):
    """A piece went wrong; the message is the reason, in one line."""


class NotRunError(Exception):
    """A piece does not apply to this machine or these settings; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of one piece.

    Attributes:
        piece: its name.
        state: ``DONE``, ``FAILED`` or ``NOT_RUN``.
        reason: why it is not done; empty where it is.
        seconds: how long it took.
        began: ISO 8601, UTC.
        values: what it found, by name.
    """

    piece: str
    state: str
    reason: str = ""
    seconds: float = 0.0
    began: str = ""
    values: dict[str, Any] = field(default_factory=dict)


class ResultFolder:
    """The results of a work folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, result: Result) -> None:
        """Keep a result; one of the same piece is replaced."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file(result.piece)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n")
        partial.rename(file)

    def read(self, piece: str) -> Result | None:
        """Return the result of a piece, None where there is none."""
        file = self._file(piece)
        return Result(**json.loads(file.read_text())) if file.exists() else None

    def is_done(self, piece: str) -> bool:
        """Tell whether a piece need not be run again."""
        result = self.read(piece)
        return result is not None and result.state == DONE

    def all(self) -> list[Result]:
        """Return every result, by the time it began."""
        found = [Result(**json.loads(file.read_text())) for file in self._folder.glob("*.json")]
        return sorted(found, key=lambda result: result.began)

    def _file(self, piece: str) -> Path:
        return self._folder / f"{piece}.json"
