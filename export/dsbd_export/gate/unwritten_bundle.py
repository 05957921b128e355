"""Bundle of an engine in the parity gate: a folder without a manifest, and its future entry."""

from dataclasses import replace
from pathlib import Path

from dsbd_runtime.bundle_files.bundle import (
    SCHEMA_VERSION,
    Bundle,
    Manifest,
    ModelEntry,
    ParityReport,
)

NOT_MEASURED = ParityReport(
    measure="mean_kl", limit=0.0, max_abs_error=0.0, mean_kl=0.0, top1_agreement=0.0, cases=[]
)


def unwritten_bundle(
    path: Path, role: str, entry: ModelEntry, target: ModelEntry | None = None
) -> Bundle:
    """Return a bundle in memory; ``target``: for a draft, the entry of the encoder it may share."""
    is_draft = role == "draft"
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        versions={},
        target=target if is_draft and target is not None else entry,
        draft=entry if is_draft else None,
        files={},
    )
    return Bundle(path, manifest)


def with_head(bundle: Bundle, role: str, logits: str, *, full_logits: bool = True) -> Bundle:
    """Return the bundle of an engine to whose graph a head was added; see ``ModelEntry``."""
    entry = replace(bundle.entry(role), logits=logits, full_logits=full_logits)
    return unwritten_bundle(bundle.path, role, entry, bundle.manifest.target)
