"""Bundle on disk: its files, opening and checking it, writing its manifest.

A bundle may come from an untrusted source. Only the files named below are read, and the external
data of an ONNX file. ONNX Runtime (1.31 or later is required) refuses external data outside of the
ONNX file's folder, also through links, and operators that it does not have itself; no custom
library is ever registered. This module refuses every link that leaves the bundle, and every file
named below that the manifest does not list. External data under other names must be in the bundle,
but its size and hash are not checked. ``staging`` writes a bundle's folder.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dsbd_errors.git_lfs import pointer_refusal
from dsbd_runtime.bundle_files.manifest import (
    DTYPES,
    MANIFEST_NAME,
    SCHEMA_VERSION,
    FileEntry,
    Manifest,
    ModelEntry,
    ParityCase,
    ParityReport,
    check_entries,
    manifest_from_file,
)
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.parts.attention.cache_entries import CacheEntry
from dsbd_runtime.parts.recent.recent_rows import FOLD_FILE
from dsbd_runtime.parts.source.encoder_entry import ENCODER_FILE, ENCODER_WEIGHTS_FILE
from dsbd_runtime.parts.source.speech_entry import ALIGNMENT_FILE
from dsbd_runtime.phases import phase, shown_bytes
from dsbd_runtime.typed_json import in_short, name_in_short

# Names that other packages import from here; the others are defined in this module.
__all__ = ["DTYPES", "ENCODER_FILE", "ENCODER_WEIGHTS_FILE", "FOLD_FILE", "MANIFEST_NAME"]
__all__ += ["SCHEMA_VERSION", "CacheEntry", "FileEntry", "Manifest", "ModelEntry"]
__all__ += ["ParityCase", "ParityReport"]

ROLES = ("target", "draft")
MODEL_FILE = "model.onnx"
WEIGHTS_FILE = f"{MODEL_FILE}.data"
PRUNE_FILE = "prune.onnx"
TOKENIZER_FILE = "tokenizer.json"
SOURCE_TOKENIZER_FILE = "source_tokenizer.json"  # if sources are tokenized unlike targets
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
ADDITIONAL_TEMPLATES_FOLDER = "additional_chat_templates"  # named templates: NAME.jinja
GENERATION_CONFIG_FILE = "generation_config.json"
TEXT_CHECKS_FILE = "text_checks.json"  # read only by the native library
_ONLY_WHERE_NEEDED = (WEIGHTS_FILE, FOLD_FILE, ENCODER_WEIGHTS_FILE)
_MOST_ENTRIES = 10_000


@dataclass(frozen=True)
class Bundle:
    """An opened bundle; ``is_verified``: whether the hash of every file was checked."""

    path: Path
    manifest: Manifest
    is_verified: bool = dataclasses.field(default=False, compare=False)

    @property
    def entry_by_role(self) -> dict[str, ModelEntry]:
        return self.manifest.entry_by_role

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.entry_by_role)

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its answer together: the context of the target.

        If the draft reads features, a source, sound or pictures, it is the shorter context of both,
        because such a draft reads the whole path. Other drafts read only the end of the path
        (``DraftContext``).
        """
        target, draft = self.manifest.target, self.manifest.draft
        if draft is None or not (draft.reads_whole_path or target.given is not None):
            return target.context_length
        return min(target.context_length, draft.context_length)

    @property
    def source_length(self) -> int | None:
        """Most tokens of a source that every encoder reads; None: requests have no source."""
        encoders = [entry.encoder for entry in self.entry_by_role.values()]
        lengths = [encoder.context_length for encoder in encoders if encoder is not None]
        return None if self.manifest.target.encoder is None else min(lengths)

    def entry(self, role: str) -> ModelEntry:
        """Return the entry of "target" or "draft"; raise InputError if the draft is absent."""
        _check_role(role)
        if role not in self.entry_by_role:
            command = shlex.join(["dsbd-export", "--bundle", str(self.path), "--draft", "DRAFT"])
            raise InputError(f"the bundle {self.path} has no draft; add one with: {command}")
        return self.entry_by_role[role]

    def num_bytes(self, role: str) -> int:
        """Return the size of the files of "target" or "draft", 0 if it is absent.

        Excludes encoder and alignment, which no call of the engine reads.
        """
        files = (ENCODER_FILE, ALIGNMENT_FILE)
        return self._num_bytes(role) - sum(self._num_bytes(role, name) for name in files)

    def num_encoder_bytes(self, role: str) -> int:
        return self._num_bytes(role, ENCODER_FILE)

    def _num_bytes(self, role: str, name: str = "") -> int:
        _check_role(role)
        files = self.manifest.files.items()
        return sum(entry.size for file, entry in files if file.startswith(f"{role}/{name}"))

    def model_path(self, role: str) -> Path:
        _check_role(role)
        return self.path / role / MODEL_FILE

    def prune_path(self, role: str) -> Path:
        _check_role(role)
        return self.path / role / PRUNE_FILE


def _existing_folder(path: object) -> Path:
    """Return the folder of a bundle; raise BundleError if it is absent."""
    if not isinstance(path, str | os.PathLike):
        raise BundleError(f"the bundle is {in_short(path)}; expected the path of a folder")
    folder = Path(path)
    try:
        is_there = folder.is_dir()
    except OSError as error:  # such as a name that is too long
        shown = name_in_short(str(folder))
        raise BundleError(f"no bundle at {shown}: {error.strerror or error}") from error
    if not is_there:
        raise BundleError(f"no bundle at {folder}: no such folder; make one with dsbd-export")
    return folder


def open_bundle(path: str | os.PathLike[str], *, verify: bool = False) -> Bundle:
    """Read and check the bundle at ``path``; a BundleError names the problem and its fix.

    Checks the schema version, that every listed file is present with its size (with ``verify`` also
    its hash), that no unlisted file would be read, and that draft and target have the same
    vocabulary and special tokens.
    """
    folder = _existing_folder(path)
    file = folder / MANIFEST_NAME
    if not file.is_file():
        raise BundleError(
            f"{folder} is not a bundle: it has no {MANIFEST_NAME}; make one with dsbd-export"
        )
    check_folder(folder)
    if reason := pointer_refusal(file):
        raise BundleError(reason)
    manifest = manifest_from_file(file)
    for name in manifest.files:
        check_name(file, name)
    with _verifying(folder, manifest) if verify else contextlib.nullcontext():
        for name, entry in manifest.files.items():
            try:
                _check_file(folder, name, entry, verify)
            except OSError as error:
                shown = folder / name_in_short(name)
                raise BundleError(f"cannot read {shown}: {error.strerror or error}") from error
    for required in (
        TOKENIZER_FILE,
        *(f"{r}/{f}" for r, e in manifest.entry_by_role.items() for f in _graphs(e)),
    ):
        if required not in manifest.files:
            raise BundleError(f"{file} lists no {required}; export again")
    check_listed(folder, manifest.files)
    _check_agreement(folder, manifest)
    return Bundle(folder, manifest, is_verified=verify)


def write_manifest(
    folder: Path, *, versions: dict[str, str], target: ModelEntry, draft: ModelEntry | None
) -> Manifest:
    """Hash every file in ``folder`` and write dsbd.json; return its content."""
    check_entries(target, draft, MANIFEST_NAME)
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


def _verifying(folder: Path, manifest: Manifest) -> contextlib.AbstractContextManager[None]:
    size = shown_bytes(sum(entry.size for entry in manifest.files.values()))
    return phase(f"comparing the hashes of {folder}: reading {size}")


def _graphs(entry: ModelEntry) -> list[str]:
    return [MODEL_FILE, PRUNE_FILE, *(file for part in entry.parts for file in part.files)]


def _check_role(role: str) -> None:
    if role not in ROLES:
        raise InputError(f"a bundle has no model {role!r}; ask for one of {', '.join(ROLES)}")


def _check_file(folder: Path, name: str, entry: FileEntry, verify: bool) -> None:
    file, shown = folder / name, folder / name_in_short(name)
    if not file.is_file():
        raise BundleError(f"{shown} is missing; copy the whole bundle or export again")
    size = file.stat().st_size
    if size != entry.size and (reason := pointer_refusal(file)):
        raise BundleError(reason)
    if size != entry.size:
        raise BundleError(
            f"{shown} has {size} bytes, the manifest says {in_short(entry.size)}; copy it or "
            "export again"
        )
    if verify and (sha256 := sha256_of(file)) != entry.sha256:
        raise BundleError(
            f"{shown} has sha256 {sha256}, the manifest says {name_in_short(entry.sha256)}; copy "
            "it or export again"
        )


def _check_agreement(folder: Path, manifest: Manifest) -> None:
    if manifest.draft is None:
        return
    if manifest.draft.encoder is not None and manifest.target.encoder is None:
        raise BundleError(
            f"the draft of {folder} is an encoder-decoder's and reads a source, which requests to "
            "its target do not have; export a pair that both read one"
        )
    read_by_target, read_by_draft = (
        entry.encoder and entry.encoder.reads for entry in (manifest.target, manifest.draft)
    )
    if manifest.draft.encoder is not None and read_by_target != read_by_draft:
        raise BundleError(
            f"target and draft of {folder} read different sources: texts, sound or pictures, or "
            "other features of these; export a pair that reads the same"
        )
    for field in ("vocab_size", "bos_token_id", "eos_token_ids"):
        target, draft = getattr(manifest.target, field), getattr(manifest.draft, field)
        if target != draft:
            raise BundleError(
                f"target and draft of {folder} differ in {field}: {in_short(target)} and "
                f"{in_short(draft)}; export a pair that shares its tokenizer"
            )


def check_folder(folder: Path) -> None:
    """Raise BundleError for a link out of the bundle, or too many files."""
    root = os.path.realpath(folder)
    num_entries = 0
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            num_entries += 1
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
                raise BundleError(
                    f"{path.parent / name_in_short(name)} is a link out of the bundle; copy the "
                    "file itself into it"
                )
        if num_entries > _MOST_ENTRIES:
            raise BundleError(
                f"{folder} has more than {_MOST_ENTRIES} files; a bundle is a folder of its own"
            )


def check_name(manifest_file: Path, name: str) -> None:
    """Raise BundleError for a name in the manifest that leads out of the bundle."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name or not name:
        raise BundleError(
            f"{manifest_file} names {in_short(name)}, a file outside the bundle; refused"
        )


def check_listed(folder: Path, listed: Collection[str]) -> None:
    """Raise BundleError for a file that would be read but is not ``listed`` in the manifest."""
    named_templates = (folder / ADDITIONAL_TEMPLATES_FOLDER).glob("*.jinja")
    for name in (
        TOKENIZER_CONFIG_FILE,
        SOURCE_TOKENIZER_FILE,
        CHAT_TEMPLATE_FILE,
        TEXT_CHECKS_FILE,
        *sorted(f"{ADDITIONAL_TEMPLATES_FOLDER}/{file.name}" for file in named_templates),
        *(f"{role}/{file}" for role in ROLES for file in _ONLY_WHERE_NEEDED),
    ):
        if name not in listed and os.path.lexists(folder / name):
            raise BundleError(
                f"{folder / name} is there, but the manifest does not list it; remove it, or "
                "export again"
            )
