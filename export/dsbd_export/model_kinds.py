"""Kinds of models that can be exported."""

from __future__ import annotations

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.encoder_decoder.source import EncoderDecoderSource
from dsbd_export.feature_draft.source import FeatureDraftSource
from dsbd_export.model_source import DecoderSource, ModelSource


def source_of(checkpoint: Checkpoint) -> ModelSource:
    """Return where a checkpoint's graph comes from."""
    if checkpoint.encoder is not None:
        return EncoderDecoderSource(checkpoint)
    is_feature_draft = checkpoint.features is not None
    return FeatureDraftSource(checkpoint) if is_feature_draft else DecoderSource(checkpoint)
