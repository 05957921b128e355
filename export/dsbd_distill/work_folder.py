"""Work folder of a distillation, DRAFT.work next to DRAFT: a killed run leaves it for the next.

settings.json has the options; a command that resumes must repeat them. The file lock is locked
while a process works in the folder. bundle/ is the exported pair while its speed is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from dsbd_distill.config import DistillConfig
from dsbd_export.changed_bundle import writing
from dsbd_export.checkpoints.checkpoint_files import json_object_or_none
from dsbd_export.errors import ExportError
from dsbd_runtime.bundle_files.durable_files import put_in_place

_NOT_COMPARED = ("output", "trust_remote_code", "num_threads")


class WorkFolder:
    """Paths of a distillation in progress."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokens = path / "tokens"  # tokens of all data
        self.held_out = path / "held_out"  # the target's samples after held-out prompts
        self.pool = path / "pool"  # rounds of labelled rows
        self.features = path / "windows.bin"
        self.pieces = path / "pieces"  # of sounds in prompts, as the encoder reads them
        self.hidden_states = path / "hidden_states"
        self.checkpoint = path / "checkpoint.pt"
        self.draft = path / "draft"

    @classmethod
    def next_to(cls, output: Path) -> WorkFolder:
        return cls(output.absolute().with_name(f"{output.name}.work"))

    @contextlib.contextmanager
    def opened(self, config: DistillConfig) -> Iterator[None]:
        """Lock the folder in the block and remove it at the end; raise ExportError if locked."""
        with writing(self.path, "free some space; the same command then resumes"):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / "lock")
            try:
                held = lock.acquire(blocking=False)
            except Timeout:
                raise ExportError(
                    f"another dsbd-distill is at work in {self.path}; wait for it, or choose "
                    "another output"
                ) from None
            with held:
                self._check_settings(config)
                is_over = False
                try:
                    yield
                    is_over = True
                finally:
                    made = (self.checkpoint, self.held_out, self.pool)
                    encoded = self.hidden_states.is_dir() and any(self.hidden_states.iterdir())
                    if is_over or not (encoded or any(path.exists() for path in made)):
                        shutil.rmtree(self.path, ignore_errors=True)

    def _check_settings(self, config: DistillConfig) -> None:
        """Raise ExportError if the folder has other options; a new folder gets these."""
        fields = [field.name for field in dataclasses.fields(config)]
        options = {name: getattr(config, name) for name in fields if name not in _NOT_COMPARED}
        now = json.loads(json.dumps(options))
        file = self.path / "settings.json"
        if not file.exists():
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(now), encoding="utf-8")
            put_in_place(partial, file)
        before = json_object_or_none(file)
        if before is None:
            raise ExportError(f"{file} is damaged; remove {self.path} and train again")
        if before != now:
            changed = [name for name in now if now[name] != before.get(name)]
            differences = (f"{name} was {before.get(name)}, is {now[name]}" for name in changed)
            raise ExportError(
                f"{self.path} is of another training ({'; '.join(differences)}); repeat the "
                "command of that one, or remove the folder"
            )


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, EOFError, TypeError, BadZipFile, zlib.error) as error:
        raise ExportError(
            f"{file} is damaged ({error}); remove it, and the same command makes it again"
        ) from error


def read_arrays(file: Path, names: Iterable[str]) -> list[NDArray[Any]]:
    """Return the arrays of an .npz file by their names; raise ExportError if it is damaged."""
    with _reading(file), file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
        return [arrays[name] for name in names]


def keep_array(file: Path, array: NDArray[Any]) -> None:
    """Write an .npy file, which appears only when it is complete."""
    partial = file.with_suffix(".partial")
    with partial.open("wb") as opened:
        np.save(opened, array, allow_pickle=False)
    put_in_place(partial, file)


def read_array(file: Path) -> NDArray[Any]:
    """Return the array of an .npy file, memory-mapped; raise ExportError if it is damaged."""
    with _reading(file):
        return np.load(file, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
