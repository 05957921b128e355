"""Bundles changed on disk: their manifest edited, written as an older version, without a draft."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle, write_manifest
from tests.runtime.tiny_graph import TinyModel


def edited(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Change the manifest's JSON in place; return the folder."""
    file = folder / "dsbd.json"
    data = json.loads(file.read_text())
    edit(data)
    file.write_text(json.dumps(data))
    return folder


def as_version_3(data: dict[str, Any]) -> None:
    """Turn a manifest into what schema version 3 has of it: one shape for all layers' caches."""
    data["schema_version"] = 3
    for role in ("target", "draft"):
        entry = data[role]
        first = entry.pop("caches")[0]
        del entry["unread_inputs"], entry["adapter"], entry["encoder"]
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


def without_draft(folder: Path, target: TinyModel) -> Bundle:
    """Remove the draft of a bundle with this target; return it opened."""
    shutil.rmtree(folder / "draft")
    write_manifest(folder, versions={}, target=target.entry(), draft=None)
    return open_bundle(folder, verify=True)
