"""The files of a bundle: their names, and that nothing outside of it is ever opened.

A bundle may come from anywhere. What is read of it are the files below, and the external data that
an ONNX file names. ONNX Runtime (from 1.31 on, which is required) refuses external data outside of
the ONNX file's own folder, links followed, and operators that it does not have itself; no custom
library is ever registered. Here every link that leaves the bundle is refused, and every file below
that the manifest does not list. Of external data under other names the place is confined, but size
and hash are not known.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from dsbd_runtime.errors import BundleError
from dsbd_runtime.typed_json import in_short, name_in_short

ROLES = ("target", "draft")
MODEL_FILE = "model.onnx"
WEIGHTS_FILE = f"{MODEL_FILE}.data"
PRUNE_FILE = "prune.onnx"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
_MOST_ENTRIES = 10_000


def check_folder(folder: Path) -> None:
    """Raise BundleError for a link out of the bundle, or far more files than a bundle has."""
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
    for name in (
        TOKENIZER_CONFIG_FILE,
        CHAT_TEMPLATE_FILE,
        *(f"{role}/{WEIGHTS_FILE}" for role in ROLES),
    ):
        if name not in listed and os.path.lexists(folder / name):
            raise BundleError(
                f"{folder / name} is there, but the manifest does not list it; remove it, or "
                "export again"
            )
