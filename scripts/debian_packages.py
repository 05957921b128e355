"""Debian packages, downloaded with apt-get and unpacked into a folder, without root."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_LONGEST_REASON = 300


class Unavailable(Exception):
    """Something is not available on this machine; tests are skipped with this reason."""


def unpack(packages: Sequence[str], place: Path, source: str | None = None) -> None:
    """Unpack packages into ``place``; its folder "apt" is used temporarily.

    Apt's lists are downloaded again, into that folder. source: a line of sources.list; None: the
    sources of this machine.

    Raises:
        Unavailable: apt-get or a package is missing.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise Unavailable(f"there is no {tool}, which brings {', '.join(packages)}")
    folder = (place / "apt").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("state/lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    options = [f"Dir::State={folder}/state", f"Dir::Cache={folder}/cache"]
    options += ["Dir::State::status=/var/lib/dpkg/status", "Acquire::Languages=none"]
    if source is not None:
        (folder / "sources.list").write_text(source + "\n")
        options += [f"Dir::Etc::SourceList={folder}/sources.list", "Dir::Etc::SourceParts=-"]
    apt = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
    _run([*apt, "update"], folder, is_needed=False)  # a list that is not needed may be unavailable
    _run([*apt, "download", *packages], folder)
    for file in sorted(folder.glob("*.deb")):
        _run(["dpkg-deb", "--extract", file.name, str(place.resolve())], folder)
    shutil.rmtree(folder)


def _run(command: list[str], place: Path, is_needed: bool = True) -> None:
    try:
        done = subprocess.run(command, cwd=place, capture_output=True, timeout=120)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} took over {error.timeout:.0f} s") from error
    if done.returncode and is_needed:
        reason = " ".join(done.stderr.decode(errors="replace").split())[-_LONGEST_REASON:]
        raise Unavailable(f"{command[0]} cannot give {command[-1]}: {reason}")
