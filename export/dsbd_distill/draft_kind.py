"""Kinds of drafts: what each begins as, learns from and is measured by, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from dsbd_distill.acceptance import Acceptance, HeldOutSamples, acceptance_of_model
from dsbd_distill.config import FEATURE, DistillConfig
from dsbd_distill.draft_head import DraftHead
from dsbd_distill.draft_model import check_shape, new_draft, shape_for, truncated_target
from dsbd_distill.feature_shape import (
    feature_shape,
    new_feature_draft,
    write_feature_draft,
)
from dsbd_distill.loss import distillation_loss, selected
from dsbd_distill.proposing_drafts import (
    ProposingDrafts,
    check_draft_vocab,
    coverage_of,
    measured,
    save,
)
from dsbd_distill.rollout import rollout_loss, rollout_reads
from dsbd_distill.source_draft import SoundDrafts, TextSourceDrafts
from dsbd_distill.teaching import Teaching, learns_few_answers
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.errors import ExportError


class DraftKind(Protocol):
    """A kind of draft, for one target.

    Attributes:
        bounds_logits: whether the loss has logits for some places at a time, however long a batch.
    """

    bounds_logits: bool

    def __init__(
        self, config: DistillConfig, teaching: Teaching, proposed: NDArray[np.int64] | None
    ) -> None:
        """Take the options, what the draft is trained with, and the tokens that it proposes."""

    @staticmethod
    def check(config: DistillConfig, target: Checkpoint) -> None:
        """Raise ExportError for options that no draft can have, before weights are read."""

    def first_draft(self) -> Any:
        """Return the draft before its first step, on the CPU."""

    def loss(self, draft: Any, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean loss of a batch of the pool; see ``distillation_loss``."""

    def acceptance(self, draft: Any, samples: list[HeldOutSamples]) -> Acceptance:
        """Return the acceptance along held-out samples."""

    def write(self, draft: Any, folder: Path) -> None:
        """Write config and weights, in fp32, into a new folder."""


class LlamaDrafts(ProposingDrafts):
    """Small Llamas of their own shape, which may propose some tokens only."""

    @staticmethod
    def check(config: DistillConfig, target: Checkpoint) -> None:
        """See DraftKind."""
        check_shape(config.num_params, None, target)
        check_draft_vocab(config, target)

    def first_draft(self) -> PreTrainedModel:
        """See DraftKind."""
        target, checkpoint = self._teaching.target, self._teaching.checkpoint
        num_params = self._config.num_params
        shape = shape_for(num_params, target.num_parameters(), checkpoint.vocab_size)
        return new_draft(target, checkpoint, shape, self._config.seed)

    def _read(self, draft: Any, tokens: Tensor, counted: Tensor) -> Tensor:
        hidden = draft.model(input_ids=tokens, use_cache=False).last_hidden_state
        return selected(hidden[:, -counted.shape[1] :], counted)


class LayerDrafts:
    """Some transformer layers of the target, in its family."""

    bounds_logits = False

    def __init__(
        self, config: DistillConfig, teaching: Teaching, proposed: NDArray[np.int64] | None
    ) -> None:
        """See DraftKind."""
        self._config = config
        self._teaching = teaching

    @staticmethod
    def check(config: DistillConfig, target: Checkpoint) -> None:
        """See DraftKind."""
        if config.draft_vocab is not None:
            raise ExportError(
                f"draft_vocab={config.draft_vocab} has no form for "
                f"target_layers={config.target_layers}, whose head is the target's; give params "
                "instead, or leave it out"
            )
        check_shape(None, config.target_layers, target)

    def first_draft(self) -> PreTrainedModel:
        """See DraftKind."""
        num_layers = self._config.target_layers
        assert num_layers is not None
        return truncated_target(self._teaching.target, self._teaching.checkpoint, num_layers)

    def loss(self, draft: Any, batch: tuple[Tensor, ...]) -> Tensor:
        """See DraftKind."""
        coverage = coverage_of(self._config)
        return distillation_loss(draft, batch, self._teaching.device, coverage)

    def acceptance(self, draft: Any, samples: list[HeldOutSamples]) -> Acceptance:
        """See DraftKind: the same at every depth of a draft."""
        teaching = self._teaching
        sampling = teaching.held_out.sampling
        return acceptance_of_model(draft, samples, sampling, teaching.device)

    def write(self, draft: Any, folder: Path) -> None:
        """See DraftKind."""
        save(draft, folder)


class FeatureDrafts:
    """Single transformer layers over hidden states of the target, which may propose some tokens."""

    bounds_logits = True

    def __init__(
        self, config: DistillConfig, teaching: Teaching, proposed: NDArray[np.int64] | None
    ) -> None:
        """See DraftKind."""
        self._config = config
        self._teaching = teaching
        self._proposed = proposed
        self._head = DraftHead(teaching.checkpoint.vocab_size, proposed, teaching.device)

    @staticmethod
    def check(config: DistillConfig, target: Checkpoint) -> None:
        """See DraftKind."""
        check_draft_vocab(config, target)
        feature_shape(config.num_params, None, target, config.draft_vocab)

    def first_draft(self) -> PreTrainedModel:
        """See DraftKind."""
        target, checkpoint = self._teaching.target, self._teaching.checkpoint
        config, num_of_target = self._config, target.num_parameters()
        shape = feature_shape(config.num_params, num_of_target, checkpoint, config.draft_vocab)
        assert shape is not None  # the target's parameters are given
        return new_feature_draft(
            target,
            checkpoint,
            shape,
            config.seed,
            self._proposed,
            keeps_embedding=learns_few_answers(config, self._teaching.streams),
        )

    def loss(self, draft: Any, batch: tuple[Tensor, ...]) -> Tensor:
        """See DraftKind."""
        coverage, device = coverage_of(self._config), self._teaching.device
        return rollout_loss(draft, batch, self._head, device, coverage)

    def acceptance(self, draft: Any, samples: list[HeldOutSamples]) -> Acceptance:
        """See DraftKind."""

        def best_of(tokens: Tensor, counted: Tensor, features: Tensor | None) -> Any:
            assert features is not None  # the teacher keeps them
            for read in rollout_reads(draft, tokens, counted, features):
                yield self._head.best_of_own(read, draft.lm_head.weight)

        return measured(draft, best_of, samples, self._teaching)

    def write(self, draft: Any, folder: Path) -> None:
        """See DraftKind."""
        write_feature_draft(draft, self._teaching.checkpoint, folder)


def draft_kind(config: DistillConfig, target: Checkpoint) -> type[DraftKind]:
    """Return the kind of draft that the options choose for a target."""
    if target.encoder is not None:
        return TextSourceDrafts if target.encoder.speech is None else SoundDrafts
    if config.kind == FEATURE:
        return FeatureDrafts
    return LlamaDrafts if config.target_layers is None else LayerDrafts
