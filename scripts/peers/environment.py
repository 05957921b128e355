"""A virtual environment for each tool, made when it is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from peers.peer import PeerError

_STAMP = ".installed"
_TIMEOUT_S = 1800


def environment_python(folder: Path, installs: Sequence[Sequence[str]]) -> Path:
    """Return the Python of the environment in ``folder``, made anew unless it has ``installs``.

    Raises:
        PeerError: it cannot be made.
    """
    python, stamp = folder / "bin" / "python", folder / _STAMP
    wanted = "\n".join(" ".join(words) for words in installs)
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    _call(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
    for words in installs:
        _call(*pip, "install", "--quiet", *words)
    stamp.write_text(wanted)
    return python


def _call(*command: str) -> None:
    print("+", *command, file=sys.stderr)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"not installed: {' '.join(command)} took over {_TIMEOUT_S} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise PeerError(f"not installed: {errors[0] if errors else f'exit {done.returncode}'}")
