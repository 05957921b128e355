"""The target and draft of a pipeline: exclusive use, and all that outlives a request.

Cache rows are kept for a next prompt that begins alike; acceptance estimators and call costs for
draft_policy "throughput".

Measured costs belong to a bundle, a provider, a number of threads and a machine, so they are kept
in the user's cache: ``$XDG_CACHE_HOME/dsbd-ort`` (``~/.cache/dsbd-ort``), one small JSON file each.
A deleted file is measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from dsbd_errors import DsbdError
from dsbd_ort.decoding.cache_view import PrefixCache
from dsbd_ort.decoding.cost_curve import CostCurve, EngineCosts, measure_costs
from dsbd_ort.decoding.step_model import StepModel
from dsbd_ort.decoding.throughput import AcceptanceEstimator
from dsbd_runtime.bundle import Bundle
from dsbd_runtime.causal_lm import CausalLM
from dsbd_runtime.errors import CapacityError

_log = logging.getLogger(__name__)
_FORMAT = 1  # of the files of costs
MOST_ESTIMATORS = 64
"""Settings (strategy, width and warping) for which draft_policy "throughput" remembers how often
drafts were accepted; the least recently used are forgotten, and learned anew."""


class BusyError(DsbdError):
    """The calling thread already holds an unfinished stream of the pipeline."""


class RequestLock:
    """Exclusive use of a pipeline by one request; a stream may end in another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # not an RLock: only its owner could release it
        self._owner: int | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the requests of other threads; raise BusyError if this thread has one."""
        if self.is_own:
            raise BusyError(
                "this thread has a stream of this pipeline that is not finished, and would wait "
                "for itself; read the stream to its end, close() it, or open a second pipeline"
            )
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    @property
    def is_own(self) -> bool:
        """Whether this thread holds the lock."""
        return self._owner == threading.get_ident()


class KeptRows:
    """The rows that a request leaves in the caches for the next one with the same prefix.

    Attributes:
        prefixes: the tokens whose rows the caches of target and draft hold.
    """

    def __init__(self, models: Sequence[CausalLM], *, are_reused: bool) -> None:
        """Take the target and, where there is one, the draft, with empty caches.

        Without ``are_reused`` no row is ever reused.
        """
        self._models = models
        self._are_reused = are_reused
        self.forget()

    def forget(self) -> None:
        """Reuse none of the rows in the caches."""
        self.prefixes = PrefixCache(), PrefixCache()

    def drop_but_for(self, token_ids: Sequence[int]) -> None:
        """Release the memory of the last request, except its common prefix with ``token_ids``."""
        if not self._are_reused:
            self.forget()
        for model, prefix in zip(self._models, self.prefixes, strict=False):
            prefix.shorten(prefix.num_common(token_ids))
            model.keep(prefix.rows)
            prefix.rows = np.arange(len(prefix.rows))
            model.shrink()
            model.reset_peak()


class KeptEstimators:
    """The acceptance estimators of the settings used last, at most MOST_ESTIMATORS of them."""

    def __init__(self) -> None:
        self._estimators: OrderedDict[object, AcceptanceEstimator] = OrderedDict()

    @property
    def settings(self) -> list[object]:
        """The settings that have an estimator, the latest used last."""
        return list(self._estimators)

    def of(self, setting: object) -> AcceptanceEstimator:
        """Return the estimator that all requests of a setting update."""
        estimator = self._estimators.pop(setting, None) or AcceptanceEstimator.initial()
        self._estimators[setting] = estimator
        if len(self._estimators) > MOST_ESTIMATORS:
            self._estimators.popitem(last=False)
        return estimator


def capacity_error(error: MemoryError) -> CapacityError:
    """Return the error of a request that ran out of memory."""
    return CapacityError(
        f"no memory for this request ({error}); use fewer beams, a shorter draft or fewer new "
        "tokens"
    )


def engine_costs(
    bundle: Bundle,
    target: StepModel,
    draft: StepModel,
    *,
    provider: str,
    num_threads: int | None,
    environment: Mapping[str, str] = os.environ,
) -> EngineCosts:
    """Return the costs of both engines: read from the cache folder, else measured and stored.

    Measuring takes some sixty calls of each engine and drops the rows of their caches.
    """
    file = _cache_folder(environment) / f"costs-{_key(bundle, provider, num_threads)}.json"
    costs = _read(file)
    if costs is None:
        _log.info("measuring the cost of engine calls, once for this bundle and machine")
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
    """Return the costs in a file, None if it does not exist or is damaged."""
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
