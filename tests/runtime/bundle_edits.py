"""Bundles changed on disk: other files, an edited or older manifest, no draft."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsbd_export.parts.head import append_topk_head
from dsbd_runtime.bundle_files.bundle import MODEL_FILE, ROLES, Bundle, open_bundle, write_manifest
from tests.runtime.tiny_graph import TinyModel


def edited(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Change the manifest's JSON in place; return the folder."""
    file = folder / "dsbd.json"
    data = json.loads(file.read_text())
    edit(data)
    file.write_text(json.dumps(data))
    return folder


GONE = object()
"""Stands for no value at all."""


def put(place: Sequence[str | int], value: Any) -> Callable[[Any], None]:
    """Return an edit that puts a value at a place of the manifest, or takes it away."""

    def edit(data: Any) -> None:
        for key in place[:-1]:
            data = data[key]
        if value is GONE:
            del data[place[-1]]
        else:
            data[place[-1]] = value

    return edit


def with_files(bundle: Path, folder: Path, text_by_name: Mapping[str, str]) -> Path:
    """Return a copy of a bundle that also has, and lists, text files such as a chat template."""
    shutil.copytree(bundle, folder)
    return with_listed(folder, text_by_name)


def with_listed(folder: Path, text_by_name: Mapping[str, str]) -> Path:
    """Write text files into a bundle and list them; return the folder."""
    manifest = open_bundle(folder).manifest
    for name, text in text_by_name.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    write_manifest(folder, versions=manifest.versions, target=manifest.target, draft=manifest.draft)
    return folder


def as_version_3(data: dict[str, Any]) -> None:
    """Turn a manifest into what schema version 3 has of it: one shape for all layers' caches."""
    data["schema_version"] = 3
    for role in ("target", "draft"):
        entry = data[role]
        first = entry.pop("caches")[0]
        for name in (
            "unread_inputs",
            "adapter",
            "encoder",
            "given",
            "form",
            "native_text",
            "agreement",
        ):
            del entry[name]
        entry["kv"] = {
            "num_layers": entry.pop("num_layers"),
            "num_heads": first["num_heads"],
            "head_dim": first["key_width"],
            "dtype": first["dtype"],
        }


def as_version_2(data: dict[str, Any]) -> None:
    """Turn a manifest into what schema version 2 has of it."""
    as_version_3(data)
    data["schema_version"] = 2
    for role in ("target", "draft"):
        for name in ("full_logits", "bit_exact", "features"):
            del data[role][name]


def with_topk_head(bundle: Path, folder: Path, num_top: int) -> Path:
    """Return a copy of a bundle whose engines also return their largest logits."""
    shutil.copytree(bundle, folder)
    manifest = open_bundle(folder).manifest
    for role in ROLES:
        append_topk_head(folder / role / MODEL_FILE, num_top)
    entries = {r: replace(getattr(manifest, r), logits=f"topk:{num_top}") for r in ROLES}
    write_manifest(folder, versions=manifest.versions, **entries)
    return folder


def without_draft(folder: Path, target: TinyModel) -> Bundle:
    """Remove the draft of a bundle with this target; return it opened."""
    shutil.rmtree(folder / "draft")
    write_manifest(folder, versions={}, target=target.entry(), draft=None)
    return open_bundle(folder, verify=True)
