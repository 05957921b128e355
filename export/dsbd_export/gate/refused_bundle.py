"""Bundle that the parity gate refused: kept under another name until a person accepts its errors.

It has every file of a bundle. Its manifest has another name, so that no host opens the bundle:

    OUTPUT.refused/dsbd.refused.json

When a person accepts it, its files move to OUTPUT and the manifest records the accepted limit.
"""

import math
import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

from dsbd_export.changed_bundle import link, writing
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity import ParityLimit
from dsbd_runtime.bundle_files.bundle import (
    MANIFEST_NAME,
    Manifest,
    ModelEntry,
    ParityReport,
    check_name,
    write_manifest,
)
from dsbd_runtime.bundle_files.manifest import manifest_from_file
from dsbd_runtime.bundle_files.staging import new_bundle
from dsbd_runtime.errors import BundleError

REFUSED_MANIFEST_NAME = "dsbd.refused.json"


def is_refused(folder: Path) -> bool:
    """Return whether a folder holds a refused bundle."""
    return (folder / REFUSED_MANIFEST_NAME).is_file()


def keep_refused(folder: Path, output: Path, manifest: Manifest, reason: str) -> ExportError:
    """Move a complete but refused bundle to OUTPUT.refused; return the error to raise."""
    final = Path(os.path.realpath(output))
    kept = final.with_name(f"{final.name}.refused")
    if is_refused(kept):
        shutil.rmtree(kept)
    if kept.exists():
        return ExportError(
            f"{reason}; nothing was kept, because {kept} exists and is no refused bundle; remove "
            "it and export again"
        )
    (folder / MANIFEST_NAME).rename(folder / REFUSED_MANIFEST_NAME)
    folder.rename(kept)
    reports = (entry.parity for entry in manifest.entry_by_role.values())
    needed = max(_needed_limit(report) for report in reports if _is_refused(report))
    limit = f"{_rounded_up(needed):.3g}"
    accept = ["--bundle", str(kept), "--accept-parity", limit, "-o", str(output)]
    return ExportError(
        f"{reason}; the result is kept apart. If such errors are acceptable finish it with: "
        f"{shlex.join(['dsbd-export', *accept])}; else remove {kept} and take a higher precision"
    )


def accept_refused(kept: Path, limit: float, output: Path) -> Manifest:
    """Move a refused bundle to ``output`` if its errors are at most ``limit``.

    Raises ExportError if there is no refused bundle or its errors are larger, BundleError if it is
    damaged or ``output`` cannot be replaced.
    """
    if not is_refused(kept):
        raise ExportError(
            f"{kept} is no refused bundle: it has no {REFUSED_MANIFEST_NAME}; give the folder that "
            "the refusal named"
        )
    before = manifest_from_file(kept / REFUSED_MANIFEST_NAME)
    for name in before.files:
        check_name(kept / REFUSED_MANIFEST_NAME, name)
    for role, entry in before.entry_by_role.items():
        needed = _needed_limit(entry.parity)
        if _is_refused(entry.parity) and needed > limit:
            raise ExportError(
                f"accept_parity={limit:g} does not accept the {role} in {kept}, which needs "
                f"{_rounded_up(needed):.3g} ({entry.parity.measure}); give that if it is acceptable"
            )
    with writing(output, "free some space or choose another output"), new_bundle(output) as folder:
        for name in before.files:
            link(kept / name, folder / name)
        manifest = write_manifest(
            folder,
            versions=before.versions,
            target=_accepted(before.target, limit),
            draft=None if before.draft is None else _accepted(before.draft, limit),
        )
        for name, file in before.files.items():
            if manifest.files[name] != file:
                raise BundleError(
                    f"{kept / name} is not the file that was measured; export the bundle again"
                )
    shutil.rmtree(kept)
    return manifest


def _accepted(entry: ModelEntry, limit: float) -> ModelEntry:
    """Return an entry with the accepted limit if it was refused, else the entry unchanged."""
    if not _is_refused(entry.parity):
        return entry
    return replace(entry, parity=replace(entry.parity, accepted=limit))


def _is_refused(report: ParityReport) -> bool:
    return _needed_limit(report) > report.limit


def _needed_limit(report: ParityReport) -> float:
    """Return the smallest limit that admits all cases."""
    limit = ParityLimit(report.measure, report.limit)
    return max(map(limit.needed_by, report.cases))


def _rounded_up(value: float) -> float:
    """Return a value above 0, rounded up to three digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / unit) * unit
