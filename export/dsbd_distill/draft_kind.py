"""Kind of draft: its first weights, its loss, its acceptance and its files."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dsbd_distill.acceptance import Acceptance, Best, BestByDepth, acceptance_by_depth
from dsbd_distill.config import DistillConfig
from dsbd_distill.draft_head import DraftHead
from dsbd_distill.lesson import Lesson
from dsbd_distill.loss import Coverage, distance, selected
from dsbd_distill.teaching import Teaching
from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.checkpoints.json_files import write_proposed_tokens
from dsbd_export.errors import ExportError


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
        """Return the mean loss of a batch of the pool; see ``distillation_loss``."""

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
    """Drafts that may propose some tokens only, with one acceptance at every depth of a draft."""

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
        """See DraftKind."""

        def best_of(tokens: Tensor, counted: Tensor, _: Tensor | None) -> Any:
            yield self._best(draft, self._read(draft, tokens, counted))

        return self._measured(draft, best_of, samples)

    def write(self, draft: Any, folder: Path) -> None:
        super().write(draft, folder)
        if self._proposed is not None:
            write_proposed_tokens(folder, self._proposed)


def check_draft_vocab(config: DistillConfig, target: Checkpoint) -> None:
    """Raise ExportError for a draft vocabulary that leaves out none of the target's tokens."""
    if config.draft_vocab is not None and config.draft_vocab >= target.vocab_size:
        raise ExportError(
            f"draft_vocab={config.draft_vocab} leaves out none of {target.vocab_size} tokens; "
            "use fewer, or leave it out"
        )
