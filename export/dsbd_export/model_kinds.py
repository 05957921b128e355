"""Kinds of models that can be exported: how each is recognized, read, paired and captured."""

from collections.abc import Callable
from dataclasses import dataclass

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.checkpoint_reading import CheckpointFiles, read_decoder
from dsbd_export.config import DraftedOptions
from dsbd_export.encoder_decoder.checkpoint import (
    check_readers,
    is_encoder_decoder,
    read_encoder_decoder,
    with_languages,
)
from dsbd_export.encoder_decoder.source import EncoderDecoderSource
from dsbd_export.feature_draft.checkpoint import (
    FeatureDraftCheckpoint,
    added_features,
    check_features_pair,
    has_feature_draft,
    paired_features,
    read_feature_draft,
)
from dsbd_export.feature_draft.source import FeatureDraftSource
from dsbd_export.model_source import ModelSource, SourceOf
from dsbd_export.pair import agreed_draft, agreed_pair
from dsbd_export.progress import Report
from dsbd_runtime.bundle_files.bundle import Bundle, ModelEntry


@dataclass(frozen=True, kw_only=True)
class ModelKind:
    """One kind of model."""

    # whether the files of a checkpoint are of this kind; the first kind that recognizes them reads
    # them
    recognizes: Callable[[CheckpointFiles], bool]
    read: Callable[[CheckpointFiles], Checkpoint]
    has: Callable[[Checkpoint], bool]
    source: SourceOf
    # raises ExportError for a pair, or options, that are not supported. The target is a checkpoint
    # or a manifest entry; the draft may be None.
    check: Callable[[Checkpoint | ModelEntry, Checkpoint | None, DraftedOptions], None] = (
        lambda *_: None
    )
    paired: Callable[[Checkpoint, Checkpoint, Report], tuple[Checkpoint, Checkpoint]] = agreed_pair
    # returns a draft of this kind, aligned with the target of a bundle
    added: Callable[[Bundle, Checkpoint, Report], Checkpoint] = agreed_draft
    as_target: Callable[[Checkpoint], Checkpoint] = lambda target: target
    without_adapters: str = ""  # why adapters are not supported; "" if they are


KINDS = (
    ModelKind(
        recognizes=has_feature_draft,
        read=read_feature_draft,
        has=lambda checkpoint: isinstance(checkpoint, FeatureDraftCheckpoint),
        source=FeatureDraftSource,
        check=check_features_pair,
        paired=paired_features,
        added=added_features,
        without_adapters="a feature draft, for which there are no adapters; leave draft_adapter "
        "out",
    ),
    ModelKind(
        recognizes=is_encoder_decoder,
        read=read_encoder_decoder,
        has=lambda checkpoint: checkpoint.encoder is not None,
        source=EncoderDecoderSource,
        check=check_readers,
        as_target=with_languages,
        without_adapters="an encoder-decoder, for which adapters are not supported; merge it into "
        "the checkpoint with PEFT, and export that",
    ),
    ModelKind(recognizes=lambda _: True, read=read_decoder, has=lambda _: True, source=ModelSource),
)


def kind_of(checkpoint: Checkpoint) -> ModelKind:
    """Return the kind of a checkpoint."""
    return next(kind for kind in KINDS if kind.has(checkpoint))


def source_of(checkpoint: Checkpoint) -> ModelSource:
    """Return the model source of a checkpoint."""
    return kind_of(checkpoint).source(checkpoint)


def check_pair(
    target: Checkpoint | ModelEntry, draft: Checkpoint | None, config: DraftedOptions
) -> None:
    """Raise ExportError for a target, a draft if any, or options that are not supported."""
    for kind in KINDS:
        kind.check(target, draft, config)
