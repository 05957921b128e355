"""Kinds of drafts: the first weights of each, its loss, its acceptance and its files.

Drafts for encoder-decoders are one or two layers of the target's decoder over its encoder. The
target's encoder is not trained, because target and draft share it in the export. Embeddings and
head are not trained if the encoder uses them too, or in speech models.
"""

import shutil
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from dsbd_distill.acceptance import (
    Acceptance,
    BestByDepth,
    acceptance_by_depth,
)
from dsbd_distill.config import FEATURE, DistillConfig
from dsbd_distill.draft_model import (
    check_shape,
    feature_shape,
    new_draft,
    new_feature_draft,
    shape_for,
    truncated_target,
    write_feature_draft,
)
from dsbd_distill.given_sounds import GivenSounds
from dsbd_distill.lesson import Lesson
from dsbd_distill.loss import (
    Best,
    Coverage,
    DraftHead,
    distance,
    rollout_loss,
    rollout_reads,
    selected,
)
from dsbd_distill.sources import SourceRowReader, SourceRows
from dsbd_distill.teaching import Teaching, learns_few_answers
from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.checkpoints.checkpoint_files import write_proposed_tokens
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ModelOptions
from dsbd_export.encoder_decoder.checkpoint import feature_extractor
from dsbd_export.errors import ExportError
from dsbd_export.given_prompt.checkpoint import GivenCheckpoint
from dsbd_export.given_prompt.processor_files import SETTINGS
from dsbd_export.opening import open_sibling
from dsbd_export.pair import check_tokens, resize_vocabulary
from dsbd_export.tokenizers.tokenizer_files import read_tokenizer


class DraftKind(ABC):
    """A kind of draft, for one target."""

    bounds_logits = True  # the loss computes logits for some places at a time

    def __init__(
        self, config: DistillConfig, teaching: Teaching, proposed: NDArray[np.int64] | None
    ) -> None:
        """Take the options, the teaching, and the tokens that the draft proposes; None: all."""
        self._config = config
        self._teaching = teaching
        self._proposed = proposed
        self._coverage = None if config.coverage is None else Coverage(config.coverage)
        self._head = DraftHead(teaching.checkpoint.vocab_size, proposed, teaching.device)

    @staticmethod
    @abstractmethod
    def check(config: DistillConfig, target: Checkpoint) -> None:
        """Raise ExportError for options that this kind does not support; no weights are read."""

    @abstractmethod
    def first_draft(self) -> Any:
        """Return the draft before its first step, on the CPU."""

    @abstractmethod
    def loss(self, draft: Any, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean distance over the places of a batch that count.

        batch: a tuple of
            tokens, (B, length);
            ids of the target's top tokens after each of the last num_labels tokens, and their
            log-probabilities, (B, num_labels, K) each;
            whether each of these places counts, (B, num_labels);
            the weight of the total variation, ().
        """

    @abstractmethod
    def acceptance(self, draft: Any, samples: list[Lesson]) -> Acceptance:
        """Return the acceptance along held-out samples."""

    def write(self, draft: Any, folder: Path) -> None:
        """Write config and weights, in fp32, into a new folder."""
        with quiet_libraries():
            draft.save_pretrained(folder)

    def _measured(self, draft: Any, best_of: BestByDepth, samples: list[Lesson]) -> Acceptance:
        teaching = self._teaching
        sampling = teaching.held_out.sampling
        return acceptance_by_depth(draft, best_of, samples, sampling, teaching.device)


class ProposingDrafts(DraftKind):
    """Drafts that may propose some tokens only, with the same acceptance at every draft depth."""

    @abstractmethod
    def _read(self, draft: Any, tokens: Tensor, counted: Tensor) -> Tensor:
        """Return the input of the head after the tokens that count, (n, H)."""

    def _log_probs(self, draft: Any, read: Tensor, ids: Tensor) -> Tensor:
        """Return the log-probabilities of tokens, (n, K); see ``DraftHead``."""
        return self._head.log_probs(read, draft.get_output_embeddings().weight, ids)

    def _best(self, draft: Any, read: Tensor) -> Best:
        return self._head.best(read, draft.get_output_embeddings().weight)

    def loss(self, draft: Any, batch: tuple[Tensor, ...]) -> Tensor:
        tokens, ids, log_p, counted, tv_weight = batch
        with self._teaching.device.autocast():
            read = self._read(draft, tokens, counted)
        ids = selected(ids, counted)
        log_p, mass = self._head.proposable(ids, selected(log_p, counted))
        log_q = self._log_probs(draft, read, ids)
        return (mass * distance(log_q, log_p, tv_weight, self._coverage)).mean()

    def acceptance(self, draft: Any, samples: list[Lesson]) -> Acceptance:
        def best_of(tokens: Tensor, counted: Tensor, _: Tensor | None) -> Any:
            yield self._best(draft, self._read(draft, tokens, counted))

        return self._measured(draft, best_of, samples)

    def write(self, draft: Any, folder: Path) -> None:
        super().write(draft, folder)
        if self._proposed is not None:
            write_proposed_tokens(folder, self._proposed)


class WholeDrafts(ProposingDrafts):
    """Drafts whose forward includes their head: ``_read`` returns logits."""

    bounds_logits = False

    def _read(self, draft: Any, tokens: Tensor, counted: Tensor) -> Tensor:
        """Return the logits, (n, V)."""
        out = draft(input_ids=tokens, use_cache=False, logits_to_keep=counted.shape[1])
        return selected(out.logits, counted)

    def _log_probs(self, draft: Any, read: Tensor, ids: Tensor) -> Tensor:
        return self._head.log_probs_of_logits(read.float(), ids)

    def _best(self, draft: Any, read: Tensor) -> Best:
        return self._head.best_of_logits(read)


def check_draft_vocab(config: DistillConfig, target: Checkpoint) -> None:
    """Raise ExportError for a draft vocabulary that leaves out none of the target's tokens."""
    if config.draft_vocab is not None and config.draft_vocab >= target.vocab_size:
        raise ExportError(
            f"draft_vocab={config.draft_vocab} leaves out none of {target.vocab_size} tokens; "
            "use fewer, or leave it out"
        )


def check_not_of_texts(config: DistillConfig, target: str) -> None:
    """Raise ExportError for options of drafts that learn from texts."""
    if config.layers_of is not None:
        raise ExportError(f"layers_of has no meaning for {target}; leave it out")
    if config.kind == FEATURE:
        raise ExportError(f"kind={FEATURE!r} is not supported for {target}; leave it out")
    if config.learn_answers:
        raise ExportError(f"learn_answers has no meaning for {target}; leave it out")


_SOURCE_LAYERS, _GIVEN_LAYERS = 1, 2  # default numbers of layers


class SourceDrafts(ProposingDrafts):
    """Decoders of few layers over the target's encoder; see DraftKind."""

    @staticmethod
    def check(config: DistillConfig, target: Checkpoint) -> None:
        family = f"the target (family {target.family}), an encoder-decoder"
        if target.encoder is not None and target.encoder.picture is not None:
            raise ExportError(
                f"{family}, reads pictures, of which no draft can be trained; give dsbd-export a "
                "smaller model of its kind as the draft, or leave it out: drafts by n-grams remain"
            )
        check_not_of_texts(config, family)
        if config.params is not None:
            raise ExportError(
                f"params={config.params!r} is not supported for {family}, whose draft is some "
                "layers of its decoder; give target_layers, 1 or 2, instead"
            )
        check_shape(None, config.target_layers or _SOURCE_LAYERS, target)
        check_draft_vocab(config, target)

    def first_draft(self) -> PreTrainedModel:
        target, checkpoint = self._teaching.target, self._teaching.checkpoint
        num_layers = self._config.target_layers or _SOURCE_LAYERS
        draft = truncated_target(target, checkpoint, num_layers)
        draft.generation_config = target.generation_config
        frozen: list[nn.Module] = [draft.get_encoder()]
        if checkpoint.encoder is not None and checkpoint.encoder.speech is not None:
            frozen.append(draft.get_output_embeddings())
        for parameter in {each for module in frozen for each in module.parameters()}:
            parameter.requires_grad_(False)
        return draft.eval()  # without dropout, which would not be reproducible

    def _rows(self, tokens: Tensor, counted: Tensor) -> tuple[SourceRows, Tensor, Tensor | None]:
        """Return separated rows of a pool, and the encoder's output for their sources."""
        reader = self._teaching.reader
        assert isinstance(reader, SourceRowReader)  # as the target reads sources
        rows = SourceRows.of(tokens, counted, reader)
        return rows, *reader.hidden_states(rows.sources, rows.is_source)


class TextSourceDrafts(WholeDrafts, SourceDrafts):
    """Drafts for targets that read text; each family computes its head differently."""

    def _read(self, draft: Any, tokens: Tensor, counted: Tensor) -> Tensor:
        """Return the logits, (n, V)."""
        rows, hidden, is_source = self._rows(tokens, counted)
        out = draft(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            attention_mask=is_source,
            decoder_input_ids=rows.targets,
            use_cache=False,
        )
        return selected(out.logits, rows.counted)


class SoundDrafts(SourceDrafts):
    """Drafts for targets that read sound: Whisper's decoders, whose head is the embedding."""

    def _read(self, draft: Any, tokens: Tensor, counted: Tensor) -> Tensor:
        rows, hidden, _ = self._rows(tokens, counted)
        out = draft.get_decoder()(
            input_ids=rows.targets, encoder_hidden_states=hidden, use_cache=False
        )
        return selected(out.last_hidden_state, rows.counted)

    def write(self, draft: Any, folder: Path) -> None:
        super().write(draft, folder)
        checkpoint = self._teaching.checkpoint
        made_by = feature_extractor("target", checkpoint.folder, checkpoint.config)
        with quiet_libraries():
            made_by.save_pretrained(folder)


class LlamaDrafts(ProposingDrafts):
    """Small Llamas whose shape is chosen by their size; they may propose some tokens only."""

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


class LayerDrafts(WholeDrafts):
    """Some transformer layers of the target, or of another model with the same tokens."""

    @staticmethod
    def check(config: DistillConfig, target: Checkpoint) -> None:
        check_shape(None, config.target_layers, lender_of_layers(config, target))
        check_draft_vocab(config, target)

    def first_draft(self) -> PreTrainedModel:
        target, checkpoint = self._teaching.target, self._teaching.checkpoint
        num_layers, lender = self._config.target_layers, lender_of_layers(self._config, checkpoint)
        assert num_layers is not None
        if lender is not checkpoint:
            target = load_model(lender)
            resize_vocabulary(target, replace(lender, vocab_size=checkpoint.vocab_size))
            lender = replace(lender, config=target.config)
        return truncated_target(target, lender, num_layers)


def lender_of_layers(config: DistillConfig, target: Checkpoint) -> Checkpoint:
    """Return the checkpoint whose layers a draft begins with; ExportError if its tokens differ."""
    if config.layers_of is None:
        return target
    options = ModelOptions(trust_remote_code=config.trust_remote_code)
    lender = open_sibling(config.layers_of, options)
    check_tokens(read_tokenizer(target), target.vocab_size, lender, lambda _: None)
    return lender


class GivenDrafts(LayerDrafts):
    """Layers of a target that reads sound in its prompts; they read the same given rows.

    The layers and the last norm are trained.
    """

    @staticmethod
    def check(config: DistillConfig, target: Checkpoint) -> None:
        check_not_of_texts(config, f"the target (family {target.family}), which reads sound")
        check_shape(None, config.target_layers or _GIVEN_LAYERS, target)
        check_draft_vocab(config, target)

    def first_draft(self) -> PreTrainedModel:
        teaching = self._teaching
        checkpoint, sounds = teaching.checkpoint, teaching.reader
        assert isinstance(checkpoint, GivenCheckpoint) and isinstance(sounds, GivenSounds)
        num_layers = self._config.target_layers or _GIVEN_LAYERS
        draft = truncated_target(teaching.target, checkpoint, num_layers)
        if (
            checkpoint.kind.has_own_adapter
        ):  # its weights are already merged into those of the target
            draft.config.has_lora_adapter = False
        else:
            checkpoint.kind.prepare(draft, checkpoint)
        draft.requires_grad_(False)
        decoder = draft.get_decoder()
        for parameter in {*decoder.parameters()} - {*draft.get_input_embeddings().parameters()}:
            parameter.requires_grad_(True)
        sounds.read_by(draft)
        return draft.eval()

    def write(self, draft: Any, folder: Path) -> None:
        super().write(draft, folder)
        for name in SETTINGS:
            if (file := self._teaching.checkpoint.folder / name).is_file():
                shutil.copyfile(file, folder / name)


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
        def best_of(tokens: Tensor, counted: Tensor, features: Tensor | None) -> Any:
            assert features is not None  # the teacher keeps them
            for read in rollout_reads(draft, tokens, counted, features):
                yield self._head.best(read, draft.lm_head.weight)

        return self._measured(draft, best_of, samples)

    def write(self, draft: Any, folder: Path) -> None:
        write_feature_draft(draft, self._teaching.checkpoint, folder)


def draft_kind(config: DistillConfig, target: Checkpoint) -> type[DraftKind]:
    """Return the kind of draft that the options choose for a target."""
    if isinstance(target, GivenCheckpoint):
        return GivenDrafts
    if target.encoder is not None:
        return TextSourceDrafts if target.encoder.speech is None else SoundDrafts
    if config.kind == FEATURE:
        return FeatureDrafts
    return LlamaDrafts if config.target_layers is None else LayerDrafts
