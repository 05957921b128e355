"""The bundle on disk: opened and checked, its manifest written; ``staging`` puts it in place."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from dsbd_runtime.bundle_files import (
    CHAT_TEMPLATE_FILE,
    MODEL_FILE,
    PRUNE_FILE,
    ROLES,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    check_folder,
    check_listed,
    check_name,
)
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.manifest import (
    DTYPES,
    MANIFEST_NAME,
    QUANTIZATIONS,
    SCHEMA_VERSION,
    FileEntry,
    KVGeometry,
    Manifest,
    ModelEntry,
    ParityCase,
    ParityReport,
    check_entry,
    manifest_from_file,
)
from dsbd_runtime.typed_json import in_short, name_in_short

__all__ = [
    "CHAT_TEMPLATE_FILE",
    "DTYPES",
    "MANIFEST_NAME",
    "MODEL_FILE",
    "PRUNE_FILE",
    "QUANTIZATIONS",
    "ROLES",
    "SCHEMA_VERSION",
    "TOKENIZER_CONFIG_FILE",
    "TOKENIZER_FILE",
    "WEIGHTS_FILE",
    "Bundle",
    "FileEntry",
    "KVGeometry",
    "Manifest",
    "ModelEntry",
    "ParityCase",
    "ParityReport",
    "open_bundle",
    "sha256_of",
    "write_manifest",
]


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its folder and its checked manifest."""

    path: Path
    manifest: Manifest

    def entry(self, role: str) -> ModelEntry:
        """Return the entry of "target" or "draft"."""
        _check_role(role)
        return self.manifest.target if role == "target" else self.manifest.draft

    def model_path(self, role: str) -> Path:
        """Return the path of the engine of "target" or "draft"."""
        _check_role(role)
        return self.path / role / MODEL_FILE

    def prune_path(self, role: str) -> Path:
        """Return the path of the prune graph of "target" or "draft"."""
        _check_role(role)
        return self.path / role / PRUNE_FILE


def open_bundle(path: str | os.PathLike[str], *, verify: bool = False) -> Bundle:
    """Read and check the bundle at ``path``.

    Checks the schema version, that every file is there with its size (with ``verify`` also its
    hash), that nothing else would be read (see ``bundle_files``), and that draft and target agree
    on vocabulary and special tokens.

    Raises:
        BundleError: naming what is wrong, the value seen, the value wanted and the mend.
    """
    folder = Path(path)
    file = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise BundleError(f"no bundle at {folder}: no such folder; make one with dsbd-export")
    if not file.is_file():
        raise BundleError(
            f"{folder} is no bundle: it has no {MANIFEST_NAME}; make one with dsbd-export"
        )
    check_folder(folder)
    manifest = manifest_from_file(file)
    for name, entry in manifest.files.items():
        check_name(file, name)
        try:
            _check_file(folder, name, entry, verify)
        except OSError as error:
            shown = folder / name_in_short(name)
            raise BundleError(f"cannot read {shown}: {error.strerror or error}") from error
    for required in (
        TOKENIZER_FILE,
        *(f"{r}/{f}" for r in ROLES for f in (MODEL_FILE, PRUNE_FILE)),
    ):
        if required not in manifest.files:
            raise BundleError(f"{file} lists no {required}; export again")
    check_listed(folder, manifest.files)
    _check_agreement(folder, manifest)
    return Bundle(folder, manifest)


def write_manifest(
    folder: Path, *, versions: dict[str, str], target: ModelEntry, draft: ModelEntry
) -> Manifest:
    """Hash every file in ``folder`` and write dsbd.json; return what was written."""
    check_entry(target, "target")
    check_entry(draft, "draft")
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


def _check_role(role: str) -> None:
    if role not in ROLES:
        raise InputError(f"a bundle has no model {role!r}; ask for one of {', '.join(ROLES)}")


def _check_file(folder: Path, name: str, entry: FileEntry, verify: bool) -> None:
    file, shown = folder / name, folder / name_in_short(name)
    if not file.is_file():
        raise BundleError(f"{shown} is missing; copy the whole bundle or export again")
    size = file.stat().st_size
    if size != entry.size:
        raise BundleError(
            f"{shown} has {size} bytes, the manifest says {in_short(entry.size)}; copy it or "
            "export again"
        )
    if verify and (found := sha256_of(file)) != entry.sha256:
        raise BundleError(
            f"{shown} has sha256 {found}, the manifest says {name_in_short(entry.sha256)}; copy "
            "it or export again"
        )


def _check_agreement(folder: Path, manifest: Manifest) -> None:
    for field in ("vocab_size", "bos_token_id", "eos_token_ids"):
        target, draft = getattr(manifest.target, field), getattr(manifest.draft, field)
        if target != draft:
            raise BundleError(
                f"target and draft of {folder} differ in {field}: {in_short(target)} and "
                f"{in_short(draft)}; export a pair that shares its tokenizer"
            )
