"""Kinds of state that a checkpoint may have; a new kind is a row here and a file in this folder."""

from collections.abc import Callable

from dsbd_export.capture.part import ExportPart
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.config import ModelOptions
from dsbd_export.parts.alignment import ExportedAlignment, aligned_speech
from dsbd_export.parts.attention_rows import ExportedAttention
from dsbd_export.parts.features import ExportedFeatures
from dsbd_export.parts.head import ExportedHead
from dsbd_export.parts.recent_rows import ExportedConvolutions, ExportedRecurrences
from dsbd_export.parts.sources import ExportedSources
from dsbd_runtime.parts.cache_entries import num_ancestors, recurrent

HasKind = Callable[[Checkpoint, ModelOptions], object]
PARTS: tuple[tuple[HasKind, Callable[[Checkpoint], ExportPart]], ...] = (
    (lambda *_: True, ExportedAttention),
    (lambda checkpoint, _: num_ancestors(checkpoint.caches), ExportedConvolutions),
    (lambda checkpoint, _: recurrent(checkpoint.caches), ExportedRecurrences),
    (lambda checkpoint, _: checkpoint.feature_layers, ExportedFeatures),
    (lambda *_: True, ExportedHead),
    (lambda checkpoint, _: checkpoint.encoder, ExportedSources),
    (lambda checkpoint, _: aligned_speech(checkpoint), ExportedAlignment),
)
"""By kind whether an engine has it, once the checkpoint's model is loaded, and its class.

Parts prepare a call and finish a model in this order: sources change the arguments of all others,
a head changes the file that features are compared by.
"""


def parts_of_engine(checkpoint: Checkpoint, options: ModelOptions) -> list[ExportPart]:
    """Return the parts that the engine of a checkpoint is made of, in their order."""
    return [kind(checkpoint) for has_kind, kind in PARTS if has_kind(checkpoint, options)]
