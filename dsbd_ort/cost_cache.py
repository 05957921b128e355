"""The measured cost curves of a bundle's engines, kept in the user's cache.

They belong to a bundle, a provider, a number of threads and a machine, so they lie beside none of
them: ``$XDG_CACHE_HOME/dsbd-ort`` (``~/.cache/dsbd-ort``), one small JSON file each. Deleting one
has it measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from dsbd_ort.decoding.cost_curve import CostCurve, EngineCosts, measure_costs
from dsbd_ort.decoding.step_model import StepModel
from dsbd_runtime.bundle import Bundle

_log = logging.getLogger(__name__)
_FORMAT = 1


def engine_costs(
    bundle: Bundle,
    target: StepModel,
    draft: StepModel,
    *,
    provider: str,
    num_threads: int | None,
    environment: Mapping[str, str] = os.environ,
) -> EngineCosts:
    """Return the costs of both engines: read from the cache, else measured and kept there.

    Measuring takes some sixty calls of each engine and drops what their caches hold.
    """
    file = _cache_folder(environment) / f"costs-{_key(bundle, provider, num_threads)}.json"
    costs = _read(file)
    if costs is None:
        _log.info("measuring what calls of both engines cost, once for this bundle and machine")
        costs = measure_costs(target, draft, time.perf_counter)
        _write(file, costs)
    return costs


def _cache_folder(environment: Mapping[str, str]) -> Path:
    root = environment.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "dsbd-ort"


def _key(bundle: Bundle, provider: str, num_threads: int | None) -> str:
    """Return a hash of all that the curves depend on."""
    manifest = bundle.manifest
    parts = [
        _FORMAT,
        provider,
        num_threads,
        os.cpu_count(),
        platform.node(),
        platform.processor() or platform.machine(),
        sorted((name, entry.sha256) for name, entry in manifest.files.items()),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _read(file: Path) -> EngineCosts | None:
    """Return what the file holds, None when there is none or it is damaged."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return EngineCosts(*(_curve(data[role]) for role in ("target", "draft")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        _log.warning("%s cannot be used (%s); the costs are measured again", file, error)
        return None


def _curve(data: Mapping[str, list[float]]) -> CostCurve:
    curve = CostCurve(tuple(map(int, data["rows"])), tuple(map(float, data["seconds"])))
    if len(curve.rows) != len(curve.seconds) or len(curve.rows) < 2:
        raise ValueError(f"{len(curve.rows)} rows and {len(curve.seconds)} seconds")
    if not all(0 <= seconds < math.inf for seconds in curve.seconds):
        raise ValueError("seconds that are negative or not finite")
    return curve


def _write(file: Path, costs: EngineCosts) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as partial:
            json.dump(asdict(costs), partial, allow_nan=False)
        os.replace(partial.name, file)
    except OSError as error:
        _log.warning("%s cannot be written (%s); the costs are measured every time", file, error)
