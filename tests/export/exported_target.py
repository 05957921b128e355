"""The target of an export again: its checkpoint, with what the export saw its layers cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.config import ExportConfig
from dsbd_export.opening import open_pair
from dsbd_runtime.bundle_files.manifest import MANIFEST_NAME, manifest_from_file


def exported_target(config: ExportConfig, bundle: Path) -> Checkpoint:
    """Return the checkpoint that was exported by ``config`` to ``bundle``."""
    caches = manifest_from_file(bundle / MANIFEST_NAME).target.caches
    return replace(open_pair(config)[0], caches=caches)
