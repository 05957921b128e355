"""Checkpoint of a feature draft; transformers has no class for it."""

from __future__ import annotations

from dataclasses import dataclass

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.checkpoint_reading import CheckpointFiles
from dsbd_export.checkpoints.model_config import layer_masks
from dsbd_export.errors import ExportError
from dsbd_export.feature_draft.config import (
    FEATURE_FAMILY,
    FeatureDraftConfig,
    is_feature_draft,
    read_feature_config,
)


@dataclass(frozen=True, kw_only=True)
class FeatureDraftCheckpoint(Checkpoint):
    """A feature draft; ``config`` is the config of its transformer layer.

    Attributes:
        features: its whole config.
    """

    features: FeatureDraftConfig

    @property
    def family(self) -> str:
        """See the base."""
        return FEATURE_FAMILY

    @property
    def names_proposed(self) -> bool:
        """See the base: d2t names them."""
        return True


def has_feature_draft(files: CheckpointFiles) -> bool:
    """Return whether files are those of a feature draft, in either published layout."""
    return files.gguf_file is None and is_feature_draft(files.folder)


def read_feature_draft(files: CheckpointFiles) -> Checkpoint:
    """Return a feature draft; ``paired_features`` adds settings of its target."""
    role, folder = files.role, files.folder
    if role != "draft":
        raise ExportError(
            f"the {role} at {folder} is a feature draft (EAGLE), which works only with its target; "
            f"give it as the draft, and the model that it was trained for as the {role}"
        )
    features = read_feature_config(folder)
    layer = features.layer
    return FeatureDraftCheckpoint(
        role=role,
        folder=folder,
        config=layer,
        vocab_size=layer.vocab_size,
        bos_token_id=None,
        eos_token_ids=[],
        context_length=layer.max_position_embeddings,
        layer_masks=layer_masks(layer, None),
        sliding_window=None,
        trust_remote_code=False,
        features=features,
    )
