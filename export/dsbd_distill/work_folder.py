"""Work folder of a distillation, DRAFT.work beside DRAFT: what a killed run leaves for the next.

    settings.json     the options, which the command that goes on must repeat
    tokenizer/        the target's
    tokens/           of all texts
    held_out/         the target's samples behind held-out prompts
    windows.bin       features of sound, and in hidden_states/ what the encoder left of it
    pool/             labelled rows, and what a feature draft reads of the target
    checkpoint.pt     the latest state of the training
    draft/            the result, until it is moved to its place
    bundle/           the exported pair, while its speed is measured
    lock              locked as long as a process works here

Every file and folder appears under its name when it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from dsbd_distill.config import DistillConfig
from dsbd_export.changed_bundle import writing
from dsbd_export.errors import ExportError
from dsbd_runtime.bundle_files.durable_files import put_in_place

_NOT_COMPARED = ("output", "trust_remote_code", "num_threads")


@dataclass(frozen=True)
class WorkFolder:
    """The paths of a distillation in progress."""

    path: Path

    @classmethod
    def beside(cls, output: Path) -> WorkFolder:
        """Return the work folder for an output."""
        return cls(output.absolute().with_name(f"{output.name}.work"))

    @property
    def tokens(self) -> Path:
        """Return the folder of the tokens of all texts."""
        return self.path / "tokens"

    @property
    def held_out(self) -> Path:
        """Return the folder of held-out samples."""
        return self.path / "held_out"

    @property
    def pool(self) -> Path:
        """Return the folder of labelled rows."""
        return self.path / "pool"

    @property
    def features(self) -> Path:
        """Return the file of the features of all windows of sound."""
        return self.path / "windows.bin"

    @property
    def hidden_states(self) -> Path:
        """Return the folder of what the encoder left of windows of sound."""
        return self.path / "hidden_states"

    @property
    def checkpoint(self) -> Path:
        """Return the file of the latest state of the training."""
        return self.path / "checkpoint.pt"

    @property
    def draft(self) -> Path:
        """Return the folder of the result."""
        return self.path / "draft"

    @contextlib.contextmanager
    def opened(self, config: DistillConfig) -> Iterator[None]:
        """Make the folder this process's own inside the block, and remove it at its end.

        After an error it stays where something was sampled or trained in it.

        Raises:
            ExportError: another process works here, the folder is of other options, or it cannot be
                written.
        """
        with writing(self.path, "free some space; the same command then goes on"):
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
                    if is_over or not self._has_work:
                        shutil.rmtree(self.path, ignore_errors=True)

    @property
    def _has_work(self) -> bool:
        """Whether something was sampled, encoded or trained."""
        made = (self.checkpoint, self.held_out, self.pool)
        encoded = self.hidden_states.is_dir() and any(self.hidden_states.iterdir())
        return encoded or any(path.exists() for path in made)

    def _check_settings(self, config: DistillConfig) -> None:
        """Raise ExportError for a folder of other options; note them in a new one."""
        fields = [field.name for field in dataclasses.fields(config)]
        options = {name: getattr(config, name) for name in fields if name not in _NOT_COMPARED}
        now = json.loads(json.dumps(options))
        file = self.path / "settings.json"
        if not file.exists():
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(now), encoding="utf-8")
            put_in_place(partial, file)
        before = _object_of(file)
        if before is None:
            raise ExportError(f"{file} is damaged; remove {self.path} and train again")
        if before != now:
            changed = [name for name in now if now[name] != before.get(name)]
            differences = (f"{name} was {before.get(name)}, is {now[name]}" for name in changed)
            raise ExportError(
                f"{self.path} is of another training ({'; '.join(differences)}); repeat the "
                "command of that one, or remove the folder"
            )


def read_arrays(file: Path, names: Iterable[str]) -> list[NDArray[Any]]:
    """Return the arrays of these names of a file that ``numpy.savez`` wrote.

    Raises:
        ExportError: the file is damaged.
    """
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            return [arrays[name] for name in names]
    except (ValueError, KeyError, EOFError, TypeError, BadZipFile, zlib.error) as error:
        raise ExportError(
            f"{file} is damaged ({error}); remove it, and the same command makes it again"
        ) from error


def read_array(file: Path) -> NDArray[Any]:
    """Return the array of a file that ``numpy.save`` wrote, mapped and not yet read.

    Raises:
        ExportError: the file is damaged.
    """
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except (ValueError, EOFError, TypeError) as error:
        raise ExportError(
            f"{file} is damaged ({error}); remove it, and the same command makes it again"
        ) from error


def _object_of(file: Path) -> dict[str, Any] | None:
    """Return the JSON object of a file, None where it holds none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
