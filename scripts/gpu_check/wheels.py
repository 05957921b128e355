"""Wheels that were carried in parts, put together again."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from pathlib import Path

from gpu_check.results import PieceError

_PART = re.compile(r"(?P<wheel>.+\.whl)\.part-(?P<number>\d+)")


def wheel_names(folder: Path) -> set[str]:
    """Return the names of the wheels that lie in a folder, whole or in parts."""
    names = {file.name for file in folder.glob("*.whl")}
    return names | set(_parts_by_wheel(folder))


def join_parts(folder: Path, output: Path) -> list[Path]:
    """Write every wheel that lies in ``folder`` in parts to ``output`` as one file.

    Parts are NAME.whl.part-00, NAME.whl.part-01 and so on.

    Raises:
        PieceError: a part is missing in between. One that is missing at the end shows when the
            wheel is opened.
    """
    wheels = []
    for name, parts in sorted(_parts_by_wheel(folder).items()):
        missing = set(range(max(parts) + 1)) - set(parts)
        if missing:
            raise PieceError(f"{folder / name} lacks part {min(missing):02}; carry it as well")
        wheels.append(output / name)
        with wheels[-1].open("wb") as whole:
            for number in sorted(parts):
                with parts[number].open("rb") as part:
                    shutil.copyfileobj(part, whole)
    return wheels


def _parts_by_wheel(folder: Path) -> dict[str, dict[int, Path]]:
    found: defaultdict[str, dict[int, Path]] = defaultdict(dict)
    for file in folder.iterdir():
        match = _PART.fullmatch(file.name)
        if match is not None:
            found[match["wheel"]][int(match["number"])] = file
    return dict(found)
