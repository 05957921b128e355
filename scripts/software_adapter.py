"""A software GPU for WebGPU on a machine without a GPU: SwiftShader from Debian's Chromium.

    eval "$(python -m scripts.software_adapter)"    # variables for the commands of this shell

The first call downloads 50 MB with apt-get, of which 6 MB are kept in build/webgpu, or in the
folder that DSBD_WEBGPU names. It needs no root. DSBD_WEBGPU=own uses the drivers of this machine.
"""

import ctypes
import os
import platform
import shutil
import sys
from pathlib import Path

import filelock

from scripts.debian_packages import Unavailable, unpack

PACKAGE = "chromium-common"
LOADER = "libvulkan.so.1"
DRIVER = "vk_swiftshader_icd.json"
OWN = "own"
_FILES = (DRIVER, "libvk_swiftshader.so", LOADER)
_ROOT = Path(__file__).parents[1]


def folder() -> Path:
    """Return the folder of the driver."""
    return Path(os.environ.get("DSBD_WEBGPU", _ROOT / "build" / "webgpu"))


def variables() -> dict[str, str]:
    """Return environment variables with which a process finds the adapter; download it once.

    Returns {} for the machine's own drivers.

    Raises:
        Unavailable: the machine is not Linux on x86-64, or the package is missing.
    """
    if os.environ.get("DSBD_WEBGPU") == OWN:
        return {}
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Unavailable(f"the adapter is for Linux on x86-64, this is {platform.platform()}")
    place = folder().resolve()
    place.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(place / "lock"):
        if not (place / "driver").is_dir():
            _download(place)
    libraries = [str(place / "driver"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {
        "VK_DRIVER_FILES": str(place / "driver" / DRIVER),
        "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1",
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
    }


def put_in_place() -> None:
    """Make this process find the adapter; call it before registering ONNX Runtime's plug-in."""
    environment = variables()
    if environment:
        os.environ.update(environment)
        # LD_LIBRARY_PATH is read when a process starts; a loaded library is found by its name
        ctypes.CDLL(str(folder() / "driver" / LOADER), mode=ctypes.RTLD_GLOBAL)


def _download(place: Path) -> None:
    """Download the package and extract the driver's files."""
    partial = place / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    unpack([PACKAGE], partial)
    (partial / "driver").mkdir()
    for name in _FILES:
        (partial / "usr" / "lib" / "chromium" / name).rename(partial / "driver" / name)
    (partial / "driver").rename(place / "driver")
    shutil.rmtree(partial)


if __name__ == "__main__":
    try:
        for name, value in variables().items():
            print(f"export {name}='{value}'")
    except Unavailable as error:
        sys.exit(f"no software adapter: {error}")
