"""The environment of a check: made from a folder of wheels, without network."""

from __future__ import annotations

import os
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from gpu_check.results import PieceError
from gpu_check.runner import Runner
from gpu_check.settings import EXTRA_BY_PROVIDER, ROOT, Settings
from gpu_check.wheels import join_parts

OPTIONAL_EXTRAS = ("export", "tensorrt", "tensorrt-rtx")  # a check can do without
_SOURCES = (ROOT, ROOT / "export", ROOT / "runtime", ROOT / "scripts")


def install(settings: Settings, runner: Runner) -> dict[str, Any]:
    """Make the environment; return by optional extra "installed" or why it is not.

    The project itself is not installed: ``variables`` puts its sources on the path.

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
    found: dict[str, Any] = {"python": str(settings.python)}
    with tempfile.TemporaryDirectory(dir=settings.work) as folder:
        join_parts(settings.wheels, Path(folder))
        links = ["--find-links", str(settings.wheels), "--find-links", folder]
        pip = [sys.executable, "-m", "pip", "--python", str(settings.python)]
        pip += ["install", "--no-index", "--quiet", "--disable-pip-version-check", *links]
        runner.run(*pip, *wanted)
        for extra in OPTIONAL_EXTRAS if not settings.bundles else OPTIONAL_EXTRAS[1:]:
            found[extra] = _try_extra(extra, pip, runner)
    return found


def _try_extra(extra: str, pip: list[str], runner: Runner) -> str:
    """Install what can be installed of an extra; return "installed" or what cannot be.

    One package at a time: an older one of other site-packages may still do.
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
    """Return what pyproject.toml asks for: of every installation, and of an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    of_extra = project["optional-dependencies"][extra] if extra else []
    return [*project["dependencies"], *of_extra]


def variables(settings: Settings) -> dict[str, str]:
    """Return the environment variables of the pieces: our sources, and CUDA's libraries.

    ONNX Runtime looks for CUDA's libraries beside itself; those of other site-packages are found
    by LD_LIBRARY_PATH, which a process reads when it starts.
    """
    found = {"PYTHONPATH": os.pathsep.join(map(str, _SOURCES)), "HF_HUB_OFFLINE": "1"}
    if settings.site_packages is not None:
        folders = sorted(settings.site_packages.glob("nvidia/*/lib"))
        before = os.environ.get("LD_LIBRARY_PATH")
        paths = [*map(str, folders), *([before] if before else [])]
        found["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    return found


def _add_packages(venv: Path, packages: Path) -> None:
    """Let the environment see the packages of another one, behind its own."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    link = venv / "lib" / version / "site-packages" / "other_packages.pth"
    link.write_text(f"{packages.resolve()}\n", encoding="utf-8")
