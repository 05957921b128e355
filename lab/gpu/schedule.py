"""Running pieces one after another; a failed piece does not stop the others."""

import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lab.gpu.environment import variables
from lab.gpu.pieces import RESULTS_NAME, Piece
from lab.gpu.runner import (
    DONE,
    FAILED,
    NOT_RUN,
    NotRunError,
    PieceError,
    Result,
    ResultFile,
    Runner,
)
from lab.gpu.settings import ROOT, Settings

_LEAST_S = 5.0  # no piece is started with less time remaining


def chosen(pieces: Sequence[Piece], only: Sequence[str], is_all: bool = True) -> list[Piece]:
    """Return the pieces whose name matches a pattern of ``only``, such as bench-*.

    Without patterns: all pieces or, unless ``is_all``, those that are not answered yet.
    """
    if not only:
        return [piece for piece in pieces if is_all or not piece.is_answered]
    return [piece for piece in pieces if any(fnmatch(piece.name, name) for name in only)]


def run_pieces(
    pieces: Sequence[Piece],
    settings: Settings,
    report: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Run the pieces that are not done; return whether none failed and none is left.

    A piece that failed or was not run in an earlier call is tried again, after the pieces that were
    never tried. Pieces for which no time remains are reported and left for the next call. Repeated
    pieces (the table) are always run. Results are written after every piece.
    """
    results = ResultFile(settings.work / RESULTS_NAME)
    states = {result.piece: result.state for result in results.all()}
    ends, is_complete = clock() + settings.limit_s, True
    for piece in sorted(
        pieces, key=lambda each: (each.is_repeated, states.get(each.name, DONE) != DONE)
    ):
        if states.get(piece.name) == DONE and not piece.is_repeated:
            report(f"{piece.name}: done before")
            continue
        left_s = piece.limit_s if piece.is_repeated else ends - clock()
        if left_s < _LEAST_S:
            report(f"{piece.name}: left for the next call, the {settings.limit_s:g} s are over")
            is_complete = False
            continue
        result = _run(piece, settings, min(piece.limit_s, left_s), clock)
        results.write(result)
        is_complete = is_complete and result.state != FAILED
        what = f"{result.state}: {result.reason}" if result.reason else result.state
        report(f"{piece.name}: {what} ({result.seconds:.1f} s)")
    return is_complete


def _run(piece: Piece, settings: Settings, limit_s: float, clock: Callable[[], float]) -> Result:
    began, state, reason = datetime.now(UTC).isoformat(), DONE, ""
    started = clock()
    runner = Runner(
        _python(settings),
        ROOT / "scripts",
        settings.work / "logs" / f"{piece.name}.log",
        variables(settings),
        limit_s,
    )
    values: dict[str, Any] = {}
    try:
        values = piece.action(settings, runner)
    except NotRunError as error:
        state, reason = NOT_RUN, str(error)
    except PieceError as error:
        state, reason, values = FAILED, str(error), error.values
    except (OSError, ValueError) as error:
        state, reason = FAILED, str(error)
    return Result(
        piece=piece.name,
        state=state,
        reason=reason,
        seconds=clock() - started,
        began=began,
        values=values,
    )


def _python(settings: Settings) -> Path:
    return settings.python or Path(sys.executable)
