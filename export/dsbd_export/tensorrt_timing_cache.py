"""Kernel times that TensorRT measured in earlier builds, kept in the user's cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsbd_export.tensorrt_options import BuildPlace


def timing_cache_file(place: BuildPlace, environment: Mapping[str, str] = os.environ) -> Path:
    """Return where the times of this version and GPU lie: ``$XDG_CACHE_HOME/dsbd-ort``."""
    root = environment.get("XDG_CACHE_HOME")
    folder = (Path(root) if root else Path.home() / ".cache") / "dsbd-ort"
    version, capability = place.trt.__version__, place.compute_capability
    return folder / f"{place.flavour.name}-{version}-sm{capability}.timing"


def load_timing_cache(config: Any, file: Path) -> Any:
    """Give the config the times of a file, or none yet; return the cache that the build fills."""
    cache = config.create_timing_cache(file.read_bytes() if file.is_file() else b"")
    config.set_timing_cache(cache, False)
    return cache


def save_timing_cache(cache: Any, file: Path) -> None:
    """Write the times; another build beside this one sees the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    partial.write_bytes(bytes(cache.serialize()))
    partial.replace(file)
