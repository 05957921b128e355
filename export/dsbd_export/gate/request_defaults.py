"""Check that the runtime can use the defaults of requests in generation_config.json.

The caller passes the check, because the export does not depend on the options of requests.
"""

from collections.abc import Callable
from pathlib import Path

from dsbd_errors import DsbdError
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_export.gate.unwritten_bundle import NOT_MEASURED, unwritten_bundle
from dsbd_runtime.bundle_files.bundle import GENERATION_CONFIG_FILE, Bundle, ModelEntry
from dsbd_runtime.bundle_files.manifest import FileEntry

CheckDefaults = Callable[[Bundle], None]
"""Raises DsbdError if opening a bundle, or every request to it, fails with its defaults."""


def check_request_defaults(checkpoint: Checkpoint, folder: Path, check: CheckDefaults) -> None:
    """Raise ExportError if generation_config.json in ``folder`` does not pass ``check``."""
    file = folder / GENERATION_CONFIG_FILE
    if not file.is_file():
        return
    entry = ModelEntry(
        family=checkpoint.family,
        vocab_size=checkpoint.vocab_size,
        bos_token_id=checkpoint.bos_token_id,
        eos_token_ids=checkpoint.eos_token_ids,
        context_length=checkpoint.context_length,
        num_layers=len(checkpoint.layer_masks),
        caches=[],
        dtype="fp32",
        quantization="none",
        logits="full",
        full_logits=True,
        masks=checkpoint.masks,
        sliding_window=None,
        parity=NOT_MEASURED,
        encoder=checkpoint.encoder,
    )
    bundle = unwritten_bundle(folder, "target", entry)
    bundle.manifest.files[GENERATION_CONFIG_FILE] = FileEntry(size=0, sha256="")
    try:
        check(bundle)
    except DsbdError as error:
        raise ExportError(
            f"{checkpoint.folder / GENERATION_CONFIG_FILE} has a default that no request could "
            f"use: {error.__cause__ or error}; change it, or remove it, and export again"
        ) from error
