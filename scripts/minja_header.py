"""google/minja at a fixed commit: the header with which native chats are built.

python -m scripts.minja_header FOLDER    # writes FOLDER/minja/minja.hpp, 130 kB
"""

import hashlib
import sys
import urllib.request
from pathlib import Path

_COMMIT = "021c2293c187789ef13d56c6cfd89c9b134fd80f"  # of September 2025
_SHA256 = "55df85289038d54566ac40903617725e82a9e07e60a21b38dc6de65f7b7e10b8"
MINJA = f"github.com/google/minja at commit {_COMMIT[:8]}"
_URL = f"https://raw.githubusercontent.com/google/minja/{_COMMIT}/include/minja/minja.hpp"
_LONGEST_S = 20


def fetch_minja(folder: Path) -> str | None:
    """Write the header unless it exists; return why that is impossible, None if it exists."""
    file = folder / "minja" / "minja.hpp"
    if file.exists():
        return None
    try:
        with urllib.request.urlopen(_URL, timeout=_LONGEST_S) as answer:
            content: bytes = answer.read()
    except OSError as error:
        return f"{_URL} cannot be had: {error}"
    if (sha256 := hashlib.sha256(content).hexdigest()) != _SHA256:
        return f"{_URL} has sha256 {sha256}, expected {_SHA256}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(fetch_minja(Path(sys.argv[1])))
