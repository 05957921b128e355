"""Checks that target and draft both read a source or neither, and of options for those that do."""

from __future__ import annotations

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.config import DraftedOptions, ExportConfig
from dsbd_export.errors import ExportError
from dsbd_runtime.bundle_files.bundle import ModelEntry
from dsbd_runtime.parts.encoder_entry import EncoderEntry


def check_readers(
    target: Checkpoint | ModelEntry, draft: Checkpoint | None, config: DraftedOptions
) -> None:
    """Raise ExportError if only one of a pair reads a source, or an option is not supported."""
    if draft is not None and (target.encoder is None) != (draft.encoder is None):
        reader, other = ("target", "draft") if draft.encoder is None else ("draft", "target")
        family = draft.family if other == "draft" else target.family
        raise ExportError(
            f"the {reader} is an encoder-decoder, the {other} (family {family}) reads no source: "
            "expected both or neither; choose a pair of one kind"
        )
    if target.encoder is None:
        return
    if draft is not None and draft.encoder is not None:
        read_by_target, read_by_draft = target.encoder.sound, draft.encoder.sound
        if read_by_target != read_by_draft:
            raise ExportError(
                f"the target (family {target.family}) reads {_in_words(target.encoder)}, the draft "
                f"(family {draft.family}) {_in_words(draft.encoder)}: both must read "
                "the same source; choose a draft of the same kind"
            )
    if isinstance(config, ExportConfig) and config.features:
        raise ExportError(
            f"features=True is not supported for the target (family {target.family}), an "
            "encoder-decoder; leave features out"
        )


def _in_words(encoder: EncoderEntry) -> str:
    """Return the input of an encoder in words."""
    speech = encoder.speech
    if speech is None:
        return "text"
    return (
        f"sound ({speech.num_mels} mels, {speech.num_frames} frames at {speech.sampling_rate} Hz, "
        f"n_fft {speech.n_fft}, hop_length {speech.hop_length})"
    )
