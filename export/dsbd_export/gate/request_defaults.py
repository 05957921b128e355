"""Defaults of requests in generation_config.json, which the runtime must be able to use.

A file of its own: the one module of the export that reads options of requests, as the runtime does.
"""

from pathlib import Path

from dsbd_errors import DsbdError
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_export.gate.unwritten_bundle import NOT_MEASURED, unwritten_bundle
from dsbd_ort.decoding.request import check_token_ids
from dsbd_ort.option_defaults import ModelDefaults, resolve
from dsbd_runtime.bundle_files.bundle import GENERATION_CONFIG_FILE, ModelEntry
from dsbd_runtime.bundle_files.manifest import FileEntry


def check_request_defaults(checkpoint: Checkpoint, folder: Path) -> None:
    """Raise ExportError if an opening, or every request, would refuse the file in ``folder``."""
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
        check_token_ids(resolve({}, ModelDefaults.from_bundle(bundle)), entry.vocab_size)
    except DsbdError as error:
        raise ExportError(
            f"{checkpoint.folder / GENERATION_CONFIG_FILE} has a default that no request could "
            f"use: {error.__cause__ or error}; change it, or remove it, and export again"
        ) from error
