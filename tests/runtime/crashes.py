"""Write a bundle over and over, killed with -9 at one place after the other.

Run by test_new_bundle in a process of its own: crashes.py FOLDER OLD SWAP, where OLD says
whether a bundle stands there before and SWAP whether the file system can swap folders. Prints how
often it was killed.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from dsbd_runtime.bundle_files.manifest import MANIFEST_NAME
from dsbd_runtime.bundle_files.staging import new_bundle, swap_folders


class KillAt:
    """An audit hook that kills the process at its n-th event: any opening, renaming, removing."""

    def __init__(self, event: int) -> None:
        self.left = event

    def __call__(self, name: str, _arguments: tuple[object, ...]) -> None:
        if name.startswith(("open", "os.", "shutil.", "ctypes.")):
            self.left -= 1
            if self.left < 0:
                signal.raise_signal(signal.SIGKILL)


def write(output: Path, content: str, can_swap: bool) -> None:
    with new_bundle(output, swap=swap_folders if can_swap else lambda *_: False) as folder:
        for name in ("model.onnx", MANIFEST_NAME):
            (folder / name).write_text(content)


def contents(output: Path) -> set[str]:
    """Content of the files of a whole bundle, one value."""
    return {(output / name).read_text() for name in ("model.onnx", MANIFEST_NAME)}


def killed_at(event: int, output: Path, can_swap: bool) -> bool:
    """Write in a child that is killed at an event; return False if it ended before that."""
    child = os.fork()
    if child == 0:
        try:
            sys.addaudithook(KillAt(event))
            write(output, "new", can_swap)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def check_after_kill(output: Path, had_old: bool, can_swap: bool) -> None:
    """Absent, old or new, and the next export cleans up and works, whether it fails or not."""
    if output.exists():
        assert contents(output) in ({"old"}, {"new"}), contents(output)
    else:
        assert not (had_old and can_swap), "a swap leaves no moment without a bundle"
    try:
        with new_bundle(output):
            raise RuntimeError("this export fails")
    except RuntimeError:
        assert os.listdir(output.parent) in ([output.name], [] if not had_old else [output.name])
    if had_old:
        assert contents(output) in ({"old"}, {"new"})
    write(output, "next", can_swap)
    assert contents(output) == {"next"}
    assert os.listdir(output.parent) == [output.name]


def main(folder: Path, had_old: bool, can_swap: bool) -> None:
    output, num_kills = folder / "bundle", 0
    while True:
        shutil.rmtree(output, ignore_errors=True)
        if had_old:
            write(output, "old", can_swap)
        if not killed_at(num_kills, output, can_swap):
            break
        check_after_kill(output, had_old, can_swap)
        num_kills += 1
    assert contents(output) == {"new"}
    print(num_kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "True", sys.argv[3] == "True")
