"""Machine of a check: the GPU, its driver, and the versions of the packages."""

import argparse
import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = (
    "onnxruntime-gpu", "onnxruntime", "tensorrt", "tensorrt-rtx", "cuda-bindings", "nvidia-ml-py",
    "nvidia-cublas", "nvidia-cuda-runtime", "nvidia-cuda-nvrtc", "nvidia-cudnn-cu13",
    "nvidia-curand", "nvidia-cufft", "numpy", "torch", "transformers",
)  # fmt: skip
_FIELDS = ("name", "driver_version", "memory.total", "compute_cap")


def describe_machine() -> dict[str, Any]:
    """Return Python, the GPUs that nvidia-smi lists (none without it), and versions by package."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"system": platform.platform(), "gpus": _gpus(), "versions": versions}


def _gpus() -> list[dict[str, str]]:
    query = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=15, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
    return [dict(zip(_FIELDS, row, strict=False)) for row in rows]


def main() -> None:
    """Write the description to ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    file = parser.parse_args().json
    file.write_text(json.dumps(describe_machine(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
