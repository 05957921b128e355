"""Exports that are killed, and several to one place at a time: a bundle is whole or absent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsbd_runtime.bundle_files.manifest import MANIFEST_NAME
from dsbd_runtime.bundle_files.staging import new_bundle, swap_folders
from dsbd_runtime.errors import BundleError

Swap = Callable[[Path, Path], bool]
CRASHES = Path(__file__).with_name("crashes.py")


def no_swap(_first: Path, _second: Path) -> bool:
    """A file system that cannot swap."""
    return False


def write(output: Path, content: str) -> None:
    with new_bundle(output) as folder:
        fill(folder, content)


def fill(folder: Path, content: str) -> None:
    (folder / MANIFEST_NAME).write_text(content)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize("can_swap", [True, False])
def test_killed_at_any_moment(tmp_path: Path, has_old: bool, can_swap: bool) -> None:
    """Afterwards the old bundle, the new one or none stands there; the next export works."""
    done = subprocess.run(
        [sys.executable, str(CRASHES), str(tmp_path), str(has_old), str(can_swap)],
        env={"PYTHONPATH": str(CRASHES.parents[2] / "runtime")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 10  # how often it was killed


@pytest.mark.parametrize("swap", [swap_folders, no_swap])
def test_the_last_export_to_finish_stays(tmp_path: Path, swap: Swap) -> None:
    output = tmp_path / "bundle"
    with new_bundle(output, swap=swap) as first:
        fill(first, "first")
        with new_bundle(output, swap=swap) as second:
            fill(second, "second")
            assert first.is_dir() and second.is_dir() and not output.exists()
        assert (output / MANIFEST_NAME).read_text() == "second"
        assert (first / MANIFEST_NAME).read_text() == "first"
    assert (output / MANIFEST_NAME).read_text() == "first"
    assert names_in(tmp_path) == ["bundle"]


def test_a_running_export_of_another_process_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    code = (
        "import sys\nfrom dsbd_runtime.bundle_files.staging import new_bundle\n"
        f"with new_bundle({str(output)!r}) as folder:\n"
        "    print('open', flush=True); sys.stdin.read()\n"
        f"    (folder / {MANIFEST_NAME!r}).write_text('slow')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(CRASHES.parents[2] / "runtime")},
    ) as slow:
        assert slow.stdout is not None and slow.stdout.readline() == b"open\n"
        write(output, "fast")
        assert len(names_in(tmp_path)) == 3  # the bundle, what is being written, and its lock
        slow.communicate()
    assert slow.returncode == 0
    assert (output / MANIFEST_NAME).read_text() == "slow"
    assert names_in(tmp_path) == ["bundle"]


@pytest.mark.parametrize("swap", [swap_folders, no_swap])
def test_what_came_into_the_way_is_not_replaced(tmp_path: Path, swap: Swap) -> None:
    output = tmp_path / "bundle"
    with pytest.raises(BundleError, match="exists and is not a bundle"):
        with new_bundle(output, swap=swap) as folder:
            fill(folder, "new")
            output.mkdir()
            (output / "thesis.txt").write_text("x")
    assert names_in(tmp_path) == ["bundle"] and names_in(output) == ["thesis.txt"]


def test_remains_of_other_outputs_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".other.partial-12345678").mkdir()
    (tmp_path / ".bundle.partial-12345678").mkdir()
    write(tmp_path / "bundle", "new")
    assert names_in(tmp_path) == [".other.partial-12345678", "bundle"]


def test_a_folder_that_takes_nothing_is_one_line() -> None:
    with pytest.raises(BundleError, match="cannot write next to /sys/kernel/bundle: "):
        write(Path("/sys/kernel/bundle"), "new")


def test_folders_are_swapped_whole(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    assert swap_folders(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "content").read_text() == "b"
    assert (tmp_path / "b" / "content").read_text() == "a"
    assert not swap_folders(tmp_path / "a", tmp_path / "absent")
