"""New version of an existing bundle: some files are kept, others are written."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dsbd_export.errors import ExportError
from dsbd_runtime.bundle_files.bundle import MANIFEST_NAME, Bundle
from dsbd_runtime.bundle_files.manifest import manifest_from_file
from dsbd_runtime.bundle_files.staging import new_bundle
from dsbd_runtime.errors import BundleError


@contextlib.contextmanager
def changed_bundle(bundle: Bundle, kept: list[str]) -> Iterator[Path]:
    """Yield a folder with the files ``kept``, which replaces the bundle if the block succeeds.

    After an error the bundle is unchanged. Raises BundleError if a kept file differs from the
    manifest, ExportError if the bundle cannot be written.
    """
    with writing(bundle.path, "free some space"), new_bundle(bundle.path) as folder:
        for name in kept:
            link(bundle.path / name, folder / name)
        yield folder
        now = manifest_from_file(folder / MANIFEST_NAME).files
        for name in kept:
            if now[name] != bundle.manifest.files[name]:
                raise BundleError(
                    f"{bundle.path / name} is not the file of the manifest: it was damaged, or "
                    "replaced meanwhile; try again, and if that fails export the bundle again"
                )


@contextlib.contextmanager
def writing(path: Path, fix: str) -> Iterator[None]:
    """Turn an OSError in the block into an ExportError that suggests ``fix``."""
    try:
        yield
    except OSError as error:
        # Errors of numpy, which writes the weights, have no errno.
        reason = str(error) if error.errno else f"the disk may be full ({error})"
        raise ExportError(f"cannot write {path}: {reason}; {fix}") from error


def link(source: Path, target: Path) -> None:
    """Link a file to a second name; copy it if the file system has no hard links."""
    target.parent.mkdir(exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
