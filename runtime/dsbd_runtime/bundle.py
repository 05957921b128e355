"""The bundle on disk: its manifest, its one reader and its one writer."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from dsbd_runtime.errors import BundleError

SCHEMA_VERSION = 1
MANIFEST_NAME = "dsbd.json"
ROLES = ("target", "draft")
MODEL_FILE = "model.onnx"
PRUNE_FILE = "prune.onnx"
TOKENIZER_FILE = "tokenizer.json"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class KVGeometry:
    """Shape of the key/value cache: ``num_layers`` pairs of [1, num_heads, C, head_dim]."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """One comparison with the checkpoint: its kind, prompt length and largest logit error."""

    name: str
    prompt_length: int
    max_abs_error: float


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """What the export measured against the checkpoint in fp32, and the limit it had to meet."""

    max_abs_error: float
    tolerance: float
    cases: list[ParityCase]


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """What a host must know of one engine.

    Attributes:
        family: ``model_type`` of the checkpoint, for people; nothing depends on it.
        context_length: highest number of positions the model was made for.
        logits: "full".
        masks: the mask inputs of the graph, a subset of the two names in ``graph``.
        sliding_window: positions a sliding-window layer sees, None without such layers.
    """

    family: str
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    context_length: int
    kv: KVGeometry
    dtype: str
    quantization: str
    logits: str
    masks: list[str]
    sliding_window: int | None
    parity: ParityReport


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size in bytes and sha256 (hex) of one file of the bundle."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of dsbd.json. ``files`` is keyed by path relative to the bundle."""

    schema_version: int
    versions: dict[str, str]
    target: ModelEntry
    draft: ModelEntry
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its folder and its checked manifest."""

    path: Path
    manifest: Manifest

    def entry(self, role: str) -> ModelEntry:
        """Return the entry of "target" or "draft"."""
        return self.manifest.target if role == "target" else self.manifest.draft

    def model_path(self, role: str) -> Path:
        """Return the path of the engine of "target" or "draft"."""
        return self.path / role / MODEL_FILE

    def prune_path(self, role: str) -> Path:
        """Return the path of the prune graph of "target" or "draft"."""
        return self.path / role / PRUNE_FILE


def open_bundle(path: str | os.PathLike[str], *, verify: bool = False) -> Bundle:
    """Read and check the bundle at ``path``.

    Checks the schema version, that every file is there with its size (with ``verify`` also its
    hash), and that draft and target agree on vocabulary and special tokens.

    Raises:
        BundleError: naming what is wrong, the value seen, the value wanted and the mend.
    """
    folder = Path(path)
    manifest = _read_manifest(folder)
    for name, entry in manifest.files.items():
        _check_file(folder, name, entry, verify)
    for role in ROLES:
        for required in (f"{role}/{MODEL_FILE}", f"{role}/{PRUNE_FILE}", TOKENIZER_FILE):
            if required not in manifest.files:
                raise BundleError(f"{folder / MANIFEST_NAME} lists no {required}; export again")
    _check_agreement(folder, manifest)
    return Bundle(folder, manifest)


@contextlib.contextmanager
def new_bundle(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty temporary sibling of ``path``, renamed to ``path`` if the block succeeds.

    A bundle is whole or absent: when the block raises, the sibling is removed. An existing
    bundle at ``path`` is replaced at the end; an existing folder that is not a bundle (nor
    empty) is refused at the start.
    """
    final = Path(os.path.abspath(path))
    if final.exists() and not (final / MANIFEST_NAME).exists():
        if not final.is_dir() or any(final.iterdir()):
            raise BundleError(f"{final} exists and is no bundle; choose another output or remove it")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{final.name}.partial-", dir=final.parent))
    except OSError as error:
        raise BundleError(f"cannot write next to {final}: {error.strerror or error}") from error
    try:
        yield staging
        os.chmod(staging, 0o755)  # mkdtemp makes it private
        _replace_folder(staging, final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_manifest(
    folder: Path, *, versions: dict[str, str], target: ModelEntry, draft: ModelEntry
) -> Manifest:
    """Hash every file in ``folder`` and write dsbd.json; return what was written."""
    files = {
        file.relative_to(folder).as_posix(): FileEntry(
            size=file.stat().st_size, sha256=sha256_of(file)
        )
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != MANIFEST_NAME
    }
    manifest = Manifest(
        schema_version=SCHEMA_VERSION, versions=versions, target=target, draft=draft, files=files
    )
    text = json.dumps(dataclasses.asdict(manifest), indent=2, allow_nan=False)
    (folder / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")
    return manifest


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace_folder(staging: Path, final: Path) -> None:
    if not final.exists():
        staging.rename(final)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{final.name}.old-", dir=final.parent))
    final.rename(old / "bundle")
    staging.rename(final)
    shutil.rmtree(old)


def _read_manifest(folder: Path) -> Manifest:
    file = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise BundleError(f"no bundle at {folder}: no such folder; make one with dsbd-export")
    if not file.is_file():
        raise BundleError(f"{folder} is no bundle: it has no {MANIFEST_NAME}; make one with dsbd-export")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise BundleError(f"{file} cannot be read as JSON ({error}); export again") from error
    found = data.get("schema_version") if isinstance(data, dict) else None
    if found != SCHEMA_VERSION or isinstance(found, bool):
        raise BundleError(
            f"{file} has schema_version {found!r}, this version reads {SCHEMA_VERSION}; "
            "export the bundle again with this version of dsbd-ort"
        )
    return _parse(Manifest, data, str(file))


def _check_file(folder: Path, name: str, entry: FileEntry, verify: bool) -> None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name or not name:
        raise BundleError(f"{folder / MANIFEST_NAME} names {name!r}, a file outside the bundle; refused")
    file = folder / name
    if not file.is_file():
        raise BundleError(f"{file} is missing; copy the whole bundle or export again")
    if not file.resolve().is_relative_to(folder.resolve()):
        raise BundleError(f"{file} is a link out of the bundle; copy the file itself into it")
    size = file.stat().st_size
    if size != entry.size:
        raise BundleError(
            f"{file} has {size} bytes, the manifest says {entry.size}; copy it again or export again"
        )
    if verify and (found := sha256_of(file)) != entry.sha256:
        raise BundleError(
            f"{file} has sha256 {found}, the manifest says {entry.sha256}; copy it again or export again"
        )


def _check_agreement(folder: Path, manifest: Manifest) -> None:
    for field in ("vocab_size", "bos_token_id", "eos_token_ids"):
        target, draft = getattr(manifest.target, field), getattr(manifest.draft, field)
        if target != draft:
            raise BundleError(
                f"target and draft of {folder} differ in {field}: {target} and {draft}; "
                "export a pair that shares its tokenizer"
            )


def _parse(kind: type[T], value: Any, where: str) -> T:
    """Build ``kind`` from parsed JSON; every mismatch names its place."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise _mismatch(kind, value, where)
        hints = typing.get_type_hints(kind)
        if odd := sorted(set(value) ^ set(hints)):
            raise BundleError(f"{where}: missing or unknown entries {odd}; export the bundle again")
        return typing.cast(T, kind(**{k: _parse(t, value[k], f"{where}: {k}") for k, t in hints.items()}))
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list and isinstance(value, list):
        return typing.cast(T, [_parse(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value)])
    if origin is dict and isinstance(value, dict):
        return typing.cast(T, {k: _parse(arguments[1], v, f"{where}: {k}") for k, v in value.items()})
    if origin is types.UnionType:
        return typing.cast(T, None if value is None else _parse(arguments[0], value, where))
    if kind is float and type(value) in (int, float):
        return typing.cast(T, float(value))
    if origin is None and type(value) is kind:
        return typing.cast(T, value)
    raise _mismatch(kind, value, where)


def _mismatch(kind: object, value: object, where: str) -> BundleError:
    wanted = getattr(kind, "__name__", str(kind))
    return BundleError(f"{where} is {value!r}, expected {wanted}; export the bundle again")
