"""Kinds of drafts: what each begins as, learns from and is measured by, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from dsbd_export.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.distill.acceptance import (
    Acceptance,
    HeldOutSamples,
    acceptance_by_depth,
    acceptance_rate,
)
from dsbd_export.distill.config import FEATURE, MODEL, DistillConfig
from dsbd_export.distill.draft_model import check_shape, new_draft, shape_for, truncated_target
from dsbd_export.distill.feature_shape import (
    feature_shape,
    new_feature_draft,
    write_feature_draft,
)
from dsbd_export.distill.loss import distillation_loss
from dsbd_export.distill.rollout import TeacherFeatures, rollout_logits, rollout_loss
from dsbd_export.distill.teaching import Teaching
from dsbd_export.feature_draft.config import default_layers
from dsbd_export.model_config import normalized_config


class DraftKind(Protocol):
    """A kind of draft, for one target."""

    def __init__(self, config: DistillConfig, teaching: Teaching) -> None:
        """Take the options and what the draft is trained with."""

    @staticmethod
    def check(config: DistillConfig, target: Checkpoint) -> None:
        """Raise ExportError for options that no draft can have, before weights are read."""

    def first_draft(self) -> Any:
        """Return the draft before its first step, on the CPU."""

    def loss(self, draft: Any, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean loss of a batch of the pool; see ``distillation_loss``."""

    def acceptance(self, draft: Any, samples: HeldOutSamples) -> Acceptance:
        """Return the acceptance along held-out samples."""

    def write(self, draft: Any, folder: Path) -> None:
        """Write config and weights, in fp32, into a new folder."""


class ModelDrafts:
    """Small models of their own."""

    def __init__(self, config: DistillConfig, teaching: Teaching) -> None:
        """See DraftKind."""
        self._config = config
        self._teaching = teaching

    @staticmethod
    def check(config: DistillConfig, target: Checkpoint) -> None:
        """See DraftKind."""
        check_shape(config.num_params, config.target_layers, target)

    def first_draft(self) -> PreTrainedModel:
        """See DraftKind."""
        config, target = self._config, self._teaching.target
        checkpoint = self._teaching.checkpoint
        if config.target_layers is not None:
            return truncated_target(target, checkpoint, config.target_layers)
        shape = shape_for(config.num_params, target.num_parameters(), checkpoint.vocab_size)
        return new_draft(target, checkpoint, shape, config.seed)

    def loss(self, draft: Any, batch: tuple[Tensor, ...]) -> Tensor:
        """See DraftKind."""
        return distillation_loss(draft, batch, self._teaching.device)

    def acceptance(self, draft: Any, samples: HeldOutSamples) -> Acceptance:
        """See DraftKind: the same at every depth of a draft."""
        rate, error = acceptance_rate(draft, samples, self._teaching.device)
        return Acceptance(rate, error, (rate,))

    def write(self, draft: Any, folder: Path) -> None:
        """See DraftKind."""
        with quiet_libraries():
            draft.save_pretrained(folder)


class FeatureDrafts:
    """Single transformer layers over hidden states of the target."""

    def __init__(self, config: DistillConfig, teaching: Teaching) -> None:
        """See DraftKind."""
        self._config = config
        self._teaching = teaching
        num_layers = normalized_config(teaching.checkpoint.config).num_layers
        self._features_of = TeacherFeatures(teaching.target, default_layers(num_layers))

    @staticmethod
    def check(config: DistillConfig, target: Checkpoint) -> None:
        """See DraftKind."""
        feature_shape(config.num_params, None, target)

    def first_draft(self) -> PreTrainedModel:
        """See DraftKind."""
        target, checkpoint = self._teaching.target, self._teaching.checkpoint
        shape = feature_shape(self._config.num_params, target.num_parameters(), checkpoint)
        assert shape is not None  # the target's parameters are given
        return new_feature_draft(target, checkpoint, shape, self._config.seed)

    def loss(self, draft: Any, batch: tuple[Tensor, ...]) -> Tensor:
        """See DraftKind."""
        return rollout_loss(draft, batch, self._features_of, self._teaching.device)

    def acceptance(self, draft: Any, samples: HeldOutSamples) -> Acceptance:
        """See DraftKind."""

        def logits_of(tokens: Tensor, num_new: int) -> Any:
            return rollout_logits(draft, tokens, num_new, self._features_of)

        return acceptance_by_depth(draft, logits_of, samples, self._teaching.device)

    def write(self, draft: Any, folder: Path) -> None:
        """See DraftKind."""
        write_feature_draft(draft, self._teaching.checkpoint, folder)


DRAFT_KINDS: dict[str, type[DraftKind]] = {MODEL: ModelDrafts, FEATURE: FeatureDrafts}
