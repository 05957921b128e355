"""Target and draft of which both read a source, or neither; what has no form for those that do."""

from __future__ import annotations

from dsbd_export.checkpoint import Checkpoint
from dsbd_export.config import DraftedOptions, ExportConfig
from dsbd_export.errors import ExportError
from dsbd_runtime.bundle import ModelEntry


def check_readers(
    target: Checkpoint | ModelEntry, draft: Checkpoint | None, config: DraftedOptions
) -> None:
    """Raise ExportError where one of a pair alone reads a source, or an option has no form."""
    if draft is not None and (target.encoder is None) != (draft.encoder is None):
        reader, other = ("target", "draft") if draft.encoder is None else ("draft", "target")
        family = draft.family if other == "draft" else target.family
        raise ExportError(
            f"the {reader} is an encoder-decoder, the {other} (family {family}) reads no source: "
            "expected both or neither; choose a pair of one kind"
        )
    if target.encoder is None:
        return
    if isinstance(config, ExportConfig) and config.features:
        raise ExportError(
            f"features=True has no form for the target (family {target.family}), an "
            "encoder-decoder; leave features out"
        )
