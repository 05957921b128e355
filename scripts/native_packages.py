"""Packages for building the native library: Debian's headers, the ONNX Runtime of the wheel.

    python -m scripts.native_packages    # prints the folder, for cmake's CMAKE_PREFIX_PATH

The first call downloads 1 MB with apt-get into build/native-packages, or into the folder that
DSBD_NATIVE_PACKAGES names. It needs no root. The header for chats is downloaded from GitHub. If
that fails, stderr says so, and the next call tries again.
"""

import fcntl
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from scripts.debian_packages import Unavailable, unpack
from scripts.minja_header import MINJA, fetch_minja

PACKAGES = ("nlohmann-json3-dev", "libpcre2-dev", "libutf8proc-dev")
HEADERS = "libonnxruntime-dev"  # an older version; newer libraries have the same functions
FORKY = (
    "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] "
    "http://deb.debian.org/debian forky main"
)
_COMPLETE = "complete-with-1.23"  # the oldest headers with functions for devices
_ROOT = Path(__file__).parents[1]


def prefix(report: Callable[[str], None] = lambda line: None) -> Path:
    """Return the folder with include/ and lib/; download it once.

    report: receives a line if the library will not support chats.

    Raises:
        Unavailable: Debian packages, or ONNX Runtime in this environment, are missing.
    """
    library = _library()
    place = Path(os.environ.get("DSBD_NATIVE_PACKAGES", _ROOT / "build" / "native-packages"))
    place.mkdir(parents=True, exist_ok=True)
    folder = place.resolve() / "usr"
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / _COMPLETE).exists():
            unpack(PACKAGES, place)
            unpack([HEADERS], place, FORKY)
            for link in (folder / "lib").rglob("*.so"):
                link.unlink()  # links to libraries in other packages; the static ones (.a) are used
            (place / _COMPLETE).touch()
        if "DSBD_MINJA_DIR" not in os.environ and (refusal := fetch_minja(folder / "include")):
            report(
                f"no chats: {refusal}; try again, or give cmake -DDSBD_MINJA_DIR=DIR, a folder "
                f"with minja/minja.hpp of {MINJA}"
            )
        for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
            link = folder / "lib" / name
            link.parent.mkdir(exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(library)
    return folder


def _library() -> Path:
    """Return ONNX Runtime's library in its wheel."""
    spec = importlib.util.find_spec("onnxruntime")
    folders = [] if spec is None else spec.submodule_search_locations or []
    libraries = [
        file for each in folders for file in Path(each, "capi").glob("libonnxruntime.so.*")
    ]
    if not libraries:
        raise Unavailable("there is no onnxruntime wheel with libonnxruntime.so here")
    return libraries[0]


if __name__ == "__main__":
    try:
        print(prefix(report=partial(print, file=sys.stderr)))
    except Unavailable as error:
        sys.exit(f"no packages: {error}")
