"""What this processor can do, as far as results depend on it."""

from __future__ import annotations

import platform
from pathlib import Path

_X86 = ("x86_64", "AMD64", "i386", "i686")
_VNNI = {"avx512_vnni", "avx_vnni"}


def saturates_int8_products(
    machine: str = platform.machine(), cpu_info: Path = Path("/proc/cpuinfo")
) -> bool:
    """Return whether products of uint8 and int8 may saturate at 16 bits on this processor.

    x86 without the VNNI instructions adds pairs of them in int16, and onnxruntime's kernels for
    W8A8 give wrong sums there unless they are told not to. Where the instructions cannot be
    looked up the answer is yes: slower is better than wrong.
    """
    if machine not in _X86:
        return False
    try:
        text = cpu_info.read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return _VNNI.isdisjoint(flags.split())
