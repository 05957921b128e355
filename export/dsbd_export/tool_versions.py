"""Versions of the libraries that make a bundle, and the versions that were tested."""

import importlib.metadata
from collections.abc import Mapping

from dsbd_runtime.tensorrt.trt_module import version_numbers

_TOOLS = ("dsbd-ort", "torch", "transformers", "optimum", "onnx", "onnxscript", "onnxruntime")
TRIED_VERSIONS: Mapping[str, tuple[str, str]] = {
    "transformers": ("5.24", "5.24"),
    "onnxruntime": ("1.31", "1.32"),
}
"""Oldest and newest tested versions of the libraries that change monthly."""


def tool_versions() -> dict[str, str]:
    """Return the versions of the tools that make a bundle, for its manifest."""
    return {tool: _version_of(tool) for tool in _TOOLS}


def tried_range(tool: str) -> str:
    """Return the tested versions of a library, such as "1.31 to 1.32"."""
    return " to ".join(dict.fromkeys(TRIED_VERSIONS[tool]))


def untried_versions(installed: Mapping[str, str]) -> list[str]:
    """Return a warning for each library that is older or newer than the tested versions."""
    return [
        f"warning: {tool} {installed[tool]} was not tested, {tried_range(tool)} was; the parity "
        "gate checks the result"
        for tool, (oldest, newest) in TRIED_VERSIONS.items()
        if (release := version_numbers(installed[tool])[:2])  # else the version is unknown
        and not version_numbers(oldest) <= release <= version_numbers(newest)
    ]


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # not installed but on the path, or with another name (onnxruntime-gpu)
