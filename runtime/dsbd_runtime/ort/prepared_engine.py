"""Cache of prepared engines: optimized and packed, so that later openings are faster.

Opening an engine optimizes its graph and packs its weights for the kernels into memory of the
process. A prepared engine is the result on disk, which later openings map:

    FOLDER/<digest>/model.onnx      the optimized graph
    FOLDER/<digest>/model.bin       weights, as they are stored and as they are packed
    FOLDER/<digest>/whole.json      sizes, checksums and hashes of both; written last

So opening only computes checksums, and the weights are in memory once for all processes that map
them. The digest covers the engine's files, the version of ONNX Runtime, the processor and the
options that influence packing; with another digest a new engine is prepared. It is written next to
its place, synced and renamed, so that any number of openers see it complete or not at all. Every
opening reads both files once and compares their checksums, or their hashes if those of the bundle
are verified; a changed one is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from filelock import lock_descriptor

from dsbd_runtime.bundle_files.bundle import WEIGHTS_FILE, Bundle, sha256_of
from dsbd_runtime.bundle_files.durable_files import checksum, sync_folder, sync_names
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.phases import phase

OpenEngine = Callable[[Path, Any], Any]
"""Opens the graph at a path with session options."""

_FORMAT = 2
_MODEL, _WEIGHTS, _WHOLE = "model.onnx", "model.bin", "whole.json"
_ENTRIES = {
    "session.optimized_model_external_initializers_file_name": _WEIGHTS,
    "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
    "session.save_external_prepacked_constant_initializers": "1",
}
_DIGESTS: dict[str, Callable[[Path], int | str]] = {"checksum": checksum, "sha256": sha256_of}
_MOST_COPIES = 2.5  # of the weights: stored, packed, and some room
_NEW = ".new-"  # prefix of folders that are being written
_SMALLEST_ROOM = 16 * 2**20

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedEngine:
    """The prepared form of one engine of a bundle.

    folder: the folder with the prepared engines of all bundles; created if absent.
    source_digest, num_bytes: digest and size of the engine's files.
    verify: whether an opening compares hashes instead of checksums.
    """

    folder: Path
    source_digest: str
    num_bytes: int
    verify: bool = False

    @classmethod
    def of_bundle(cls, folder: Path, bundle: Bundle, role: str) -> PreparedEngine:
        """Return the one of "target" or "draft", by the hashes of its files in the manifest."""
        files = bundle.manifest.files
        of_engine = {
            name: files[name]
            for name in (f"{role}/model.onnx", f"{role}/{WEIGHTS_FILE}")
            if name in files
        }
        content = json.dumps({Path(name).name: entry.sha256 for name, entry in of_engine.items()})
        digest = hashlib.sha256(content.encode()).hexdigest()
        num_bytes = sum(entry.size for entry in of_engine.values())
        return cls(folder, digest, num_bytes, verify=bundle.is_verified)

    def open(
        self,
        ort: ModuleType,
        model_path: Path,
        new_options: Callable[[], Any],
        open_engine: OpenEngine,
    ) -> Any:
        """Return the engine, opened from its prepared form, which is made if absent.

        A damaged prepared engine is made again. If it cannot be written, the original is opened.
        Both log a warning. open_engine: opens a graph; raises BundleError if it cannot.
        """
        place = self.folder / self._name(ort, new_options())
        with phase(f"comparing the checksums of the prepared engine {place}"):
            is_whole = self._is_whole(place)
        if not is_whole:
            if place.exists():
                _log.warning("the prepared engine %s is damaged and is made again", place)
            try:
                with phase(f"preparing {model_path} in {self.folder} for later openings"):
                    self._prepare(place, partial(open_engine, model_path), new_options)
            except OSError as error:
                _log.warning(
                    "cannot keep a prepared engine of %s in %s (%s): it opens without one; free "
                    "some room or name another folder",
                    *(model_path, self.folder, error),
                )
                return open_engine(model_path, new_options())
        options = new_options()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            return open_engine(place / _MODEL, options)
        except BundleError as error:
            _log.warning("a prepared engine cannot be opened and is removed: %s", error)
            shutil.rmtree(place, ignore_errors=True)
            return open_engine(model_path, new_options())

    def _name(self, ort: ModuleType, options: Any) -> str:
        parts = [_FORMAT, self.source_digest, ort.__version__, *_processor(), _precision(options)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def _prepare(
        self, place: Path, open_source: Callable[[Any], Any], new_options: Callable[[], Any]
    ) -> None:
        """Write the prepared engine. BundleError: the engine is invalid; OSError: not written."""
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"engine_cache is {self.folder}, which is a file; expected a folder")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _clear_abandoned(self.folder)
        needed = int(_MOST_COPIES * self.num_bytes) + _SMALLEST_ROOM
        if (free := shutil.disk_usage(self.folder).free) < needed:
            raise OSError(f"{free} bytes are free, it may take {needed}")
        with _new_folder(self.folder) as new:
            made = new / "engine"
            made.mkdir(mode=0o700)
            options = new_options()
            options.optimized_model_filepath = str(made / _MODEL)
            for key, value in _ENTRIES.items():
                options.add_session_config_entry(key, value)
            try:
                open_source(options)
            except BundleError as error:
                open_source(new_options())  # raises if the engine itself is invalid
                raise OSError(f"ONNX Runtime cannot write it: {error}") from error
            record = {name: _of_parts(made, digest) for name, digest in _DIGESTS.items()}
            (made / _WHOLE).write_text(json.dumps(record), encoding="utf-8")
            sync_folder(made)
            if place.exists():  # damaged, or made by another opener in the meantime
                if self._is_whole(place):
                    return
                shutil.rmtree(place, ignore_errors=True)
            with contextlib.suppress(OSError):  # another opener was first, checked below
                made.rename(place)
            sync_names(self.folder)
        if not self._is_whole(place):
            raise OSError(f"{place} is not what was written to it")

    def _is_whole(self, place: Path) -> bool:
        name = "sha256" if self.verify else "checksum"
        try:
            written = json.loads((place / _WHOLE).read_text(encoding="utf-8"))
            return isinstance(written, dict) and written.get(name) == _of_parts(
                place, _DIGESTS[name]
            )
        except (OSError, ValueError, RecursionError):  # also if the record itself is damaged
            return False


def _of_parts(place: Path, digest: Callable[[Path], int | str]) -> dict[str, int | str]:
    """Return the digests of the graph and, if present, the weights of a prepared engine."""
    parts = [_MODEL, *([_WEIGHTS] if (place / _WEIGHTS).exists() else [])]
    return {part: digest(place / part) for part in parts}


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Make a temporary folder in ``folder``, locked while its process runs."""
    with (
        contextlib.ExitStack() as locks,
        tempfile.TemporaryDirectory(
            prefix=_NEW, dir=_locked(folder, locks), ignore_cleanup_errors=True
        ) as name,
        contextlib.ExitStack() as own_lock,
    ):
        _locked(Path(name), own_lock)
        locks.close()
        yield Path(name)


def _clear_abandoned(folder: Path) -> None:
    with contextlib.ExitStack() as locks:
        _locked(folder, locks)  # so that no unlocked folder is made meanwhile
        for left in folder.glob(f"{_NEW}*"):
            with contextlib.suppress(OSError), contextlib.ExitStack() as own_lock:
                descriptor = os.open(left, os.O_RDONLY)
                own_lock.callback(os.close, descriptor)
                if lock_descriptor(descriptor, blocking=False):
                    shutil.rmtree(left, ignore_errors=True)


def _locked(folder: Path, locks: contextlib.ExitStack) -> Path:
    """Return a folder, locked until ``locks`` is closed if the system can lock folders."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        locks.callback(os.close, descriptor)
        lock_descriptor(descriptor)
    return folder


def _processor(cpu_info: Path = Path("/proc/cpuinfo")) -> tuple[str, str]:
    """Return the architecture and the instructions, which decide the choice of kernels."""
    try:
        lines = cpu_info.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return platform.machine(), platform.processor()
    relevant = (
        line for line in lines if line.lower().startswith(("flags", "features", "model name"))
    )
    return platform.machine(), "\n".join(sorted(set(relevant)))


def _precision(options: Any) -> str:
    try:
        return str(options.get_session_config_entry("session.x64quantprecision"))
    except RuntimeError:  # never set
        return ""
