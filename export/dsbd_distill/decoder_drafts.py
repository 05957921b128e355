"""Kinds of drafts for decoders, and the choice of a kind for any target."""

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from dsbd_distill.acceptance import Acceptance, acceptance_of_model
from dsbd_distill.config import FEATURE, DistillConfig
from dsbd_distill.draft_kind import DraftKind, ProposingDrafts, check_draft_vocab
from dsbd_distill.draft_model import check_shape, new_draft, shape_for, truncated_target
from dsbd_distill.feature_shape import feature_shape, new_feature_draft, write_feature_draft
from dsbd_distill.lesson import Lesson
from dsbd_distill.loss import distillation_loss, selected
from dsbd_distill.rollout import rollout_loss, rollout_reads
from dsbd_distill.source_draft import SoundDrafts, TextSourceDrafts
from dsbd_distill.teaching import learns_few_answers
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.errors import ExportError


class LlamaDrafts(ProposingDrafts):
    """Small Llamas of their own shape, which may propose some tokens only."""

    @staticmethod
    def check(config: DistillConfig, target: Checkpoint) -> None:
        check_shape(config.num_params, None, target)
        check_draft_vocab(config, target)

    def first_draft(self) -> PreTrainedModel:
        target, checkpoint = self._teaching.target, self._teaching.checkpoint
        num_params = self._config.num_params
        shape = shape_for(num_params, target.num_parameters(), checkpoint.vocab_size)
        return new_draft(target, checkpoint, shape, self._config.seed)

    def _read(self, draft: Any, tokens: Tensor, counted: Tensor) -> Tensor:
        hidden = draft.model(input_ids=tokens, use_cache=False).last_hidden_state
        return selected(hidden[:, -counted.shape[1] :], counted)


class LayerDrafts(DraftKind):
    """Some transformer layers of the target, in its family."""

    bounds_logits = False

    @staticmethod
    def check(config: DistillConfig, target: Checkpoint) -> None:
        if config.draft_vocab is not None:
            raise ExportError(
                f"draft_vocab={config.draft_vocab} is not supported with "
                f"target_layers={config.target_layers}, whose draft has the target's head; give "
                "params instead, or leave it out"
            )
        check_shape(None, config.target_layers, target)

    def first_draft(self) -> PreTrainedModel:
        num_layers = self._config.target_layers
        assert num_layers is not None
        return truncated_target(self._teaching.target, self._teaching.checkpoint, num_layers)

    def loss(self, draft: Any, batch: tuple[Tensor, ...]) -> Tensor:
        return distillation_loss(draft, batch, self._teaching.device, self._coverage)

    def acceptance(self, draft: Any, samples: list[Lesson]) -> Acceptance:
        teaching = self._teaching
        sampling = teaching.held_out.sampling
        return acceptance_of_model(draft, samples, sampling, teaching.device)


class FeatureDrafts(DraftKind):
    """Single transformer layers over hidden states of the target, which may propose some tokens."""

    @staticmethod
    def check(config: DistillConfig, target: Checkpoint) -> None:
        check_draft_vocab(config, target)
        if config.num_params is not None:
            feature_shape(config.num_params, 0, target, config.draft_vocab)

    def first_draft(self) -> PreTrainedModel:
        target, checkpoint = self._teaching.target, self._teaching.checkpoint
        config, num_of_target = self._config, target.num_parameters()
        shape = feature_shape(config.num_params, num_of_target, checkpoint, config.draft_vocab)
        return new_feature_draft(
            target,
            checkpoint,
            shape,
            config.seed,
            self._proposed,
            keeps_embedding=learns_few_answers(config, self._teaching.streams),
        )

    def loss(self, draft: Any, batch: tuple[Tensor, ...]) -> Tensor:
        return rollout_loss(draft, batch, self._head, self._teaching.device, self._coverage)

    def acceptance(self, draft: Any, samples: list[Lesson]) -> Acceptance:
        """See DraftKind."""

        def best_of(tokens: Tensor, counted: Tensor, features: Tensor | None) -> Any:
            assert features is not None  # the teacher keeps them
            for read in rollout_reads(draft, tokens, counted, features):
                yield self._head.best(read, draft.lm_head.weight)

        return self._measured(draft, best_of, samples)

    def write(self, draft: Any, folder: Path) -> None:
        write_feature_draft(draft, self._teaching.checkpoint, folder)


def draft_kind(config: DistillConfig, target: Checkpoint) -> type[DraftKind]:
    """Return the kind of draft that the options choose for a target."""
    if target.encoder is not None:
        return TextSourceDrafts if target.encoder.speech is None else SoundDrafts
    if config.kind == FEATURE:
        return FeatureDrafts
    return LlamaDrafts if config.target_layers is None else LayerDrafts
