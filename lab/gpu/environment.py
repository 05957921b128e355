"""Environment of a check, installed offline from a folder of wheels, and missing requirements."""

import ctypes
import importlib.metadata
import importlib.util
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.gpu.runner import PieceError, Runner
from lab.gpu.settings import EXTRA_BY_PROVIDER, ROOT, WEBGPU, Settings

OPTIONAL_EXTRAS = ("export", "native", "tensorrt", "tensorrt-rtx")  # may be missing
_SOURCES = (ROOT, ROOT / "export", ROOT / "runtime")

DRIVER = "libcuda.so.1"
_PACKAGES = {  # by provider, wheel name: (module, distribution)
    "cuda": {
        "onnxruntime_gpu": ("onnxruntime", "onnxruntime-gpu"),
        "cuda_bindings": ("cuda", "cuda-bindings"),
    },
    WEBGPU: {"onnxruntime_ep_webgpu": ("onnxruntime_ep_webgpu", "onnxruntime-ep-webgpu")},
    "cpu": {},
}


def install(settings: Settings, runner: Runner) -> dict[str, Any]:
    """Create the environment; return for each optional extra "installed" or the reason why not.

    The project itself is not installed; ``variables`` adds its sources to the path.

    Raises:
        PieceError: a package of the provider cannot be installed.
    """
    if settings.wheels is None or settings.python is None:
        return {"python": sys.executable, "note": "no --wheels: the Python that runs this script"}
    venv = settings.work / "venv"
    runner.run(sys.executable, "-m", "venv", "--clear", "--without-pip", venv)
    if settings.site_packages is not None:
        _add_packages(venv, settings.site_packages)
    wanted = requirements(EXTRA_BY_PROVIDER[settings.provider])
    result: dict[str, Any] = {"python": str(settings.python)}
    pip = [sys.executable, "-m", "pip", "--python", str(settings.python), "install", "--no-index"]
    pip += ["--quiet", "--disable-pip-version-check", "--find-links", str(settings.wheels)]
    runner.run(*pip, *wanted)
    for extra in OPTIONAL_EXTRAS if not settings.bundles else OPTIONAL_EXTRAS[1:]:
        result[extra] = _try_extra(extra, pip, runner)
    return result


def _try_extra(extra: str, pip: list[str], runner: Runner) -> str:
    """Install the available packages of an extra; return "installed" or the missing packages.

    Packages are installed one by one: an older version in other site-packages may be sufficient.
    """
    reasons = []
    base = set(requirements())
    for requirement in requirements(extra):
        if requirement not in base:
            try:
                runner.run(*pip, requirement)
            except PieceError as error:
                reasons.append(f"{requirement}: {error}")
    return "; ".join(reasons) or "installed"


def requirements(extra: str | None = None) -> list[str]:
    """Return requirements of pyproject.toml: those of every installation, and those of an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    of_extra = project["optional-dependencies"][extra] if extra else []
    return [*project["dependencies"], *of_extra]


def variables(settings: Settings) -> dict[str, str]:
    """Return environment variables of the pieces: paths of our sources and of CUDA's libraries.

    ONNX Runtime looks for CUDA's libraries next to itself. Libraries in other site-packages are
    found through LD_LIBRARY_PATH, which a process reads when it starts.
    """
    paths = [*map(str, _SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    if settings.site_packages is not None:
        folders = sorted(settings.site_packages.glob("nvidia/*/lib"))
        before = os.environ.get("LD_LIBRARY_PATH")
        paths = [*map(str, folders), *([before] if before else [])]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    return environment


def _add_packages(venv: Path, packages: Path) -> None:
    """Make another environment's packages visible in the environment, after its own packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    link = venv / "lib" / version / "site-packages" / "other_packages.pth"
    link.write_text(f"{packages.resolve()}\n", encoding="utf-8")


def missing_requirements(
    settings: Settings, load_library: Callable[[str], object] = ctypes.CDLL
) -> list[str]:
    """Return missing requirements of pieces on a GPU, one line each; the CPU has none."""
    lines = []
    try:
        if settings.provider == "cuda":
            load_library(DRIVER)
    except OSError as error:
        lines.append(
            f"no NVIDIA driver: {error}; install one for CUDA 13 (580 or newer), in a container "
            "pass the GPU in (docker run --gpus all)"
        )
    for wheel, (module, distribution) in _PACKAGES[settings.provider].items():
        if not _is_here(settings, wheel, module, distribution):
            where = f"in {settings.wheels}" if settings.wheels else "in this Python"
            lines.append(f"no package {distribution} {where}; bring its wheel, see docs/gpu.md")
    return lines


def _is_here(settings: Settings, wheel: str, module: str, distribution: str) -> bool:
    if settings.wheels is not None:
        if not settings.wheels.is_dir():
            return False
        in_wheels = any(settings.wheels.glob(f"{wheel}-*.whl"))
        return in_wheels or _is_in(settings.site_packages, wheel)
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec(module) is not None


def _is_in(site_packages: Path | None, wheel: str) -> bool:
    return site_packages is not None and any(site_packages.glob(f"{wheel}-*.dist-info"))
