"""What drafts share that may propose some tokens only: their loss, acceptance and files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from dsbd_distill.acceptance import (
    Acceptance,
    Best,
    BestByDepth,
    HeldOutSamples,
    acceptance_by_depth,
)
from dsbd_distill.config import DistillConfig
from dsbd_distill.draft_head import DraftHead
from dsbd_distill.loss import Coverage, distance, selected
from dsbd_distill.teaching import Teaching
from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.checkpoints.proposed_tokens import write_proposed_tokens
from dsbd_export.errors import ExportError


class ProposingDrafts(ABC):
    """Drafts whose head proposes all tokens or some; see DraftKind."""

    bounds_logits = True

    def __init__(
        self, config: DistillConfig, teaching: Teaching, proposed: NDArray[np.int64] | None
    ) -> None:
        """See DraftKind."""
        self._config = config
        self._teaching = teaching
        self._proposed = proposed
        self._coverage = coverage_of(config)
        self._head = DraftHead(teaching.checkpoint.vocab_size, proposed, teaching.device)

    @abstractmethod
    def _read(self, draft: Any, tokens: Tensor, counted: Tensor) -> Tensor:
        """Return what ``_log_probs`` and ``_best`` read behind the tokens that count, (n, H)."""

    def _log_probs(self, draft: Any, read: Tensor, ids: Tensor) -> Tensor:
        """Return the log-probabilities of tokens, (n, K); see ``DraftHead``."""
        return self._head.log_probs(read, draft.get_output_embeddings().weight, ids)

    def _best(self, draft: Any, read: Tensor) -> Best:
        """Return the most probable tokens."""
        return self._head.best(read, draft.get_output_embeddings().weight)

    def loss(self, draft: Any, batch: tuple[Tensor, ...]) -> Tensor:
        """See DraftKind."""
        tokens, ids, log_p, counted, tv_weight = batch
        with self._teaching.device.autocast():
            read = self._read(draft, tokens, counted)
        ids = selected(ids, counted)
        log_p, mass = self._head.proposable(ids, selected(log_p, counted))
        log_q = self._log_probs(draft, read, ids)
        return (mass * distance(log_q, log_p, tv_weight, self._coverage)).mean()

    def acceptance(self, draft: Any, samples: list[HeldOutSamples]) -> Acceptance:
        """See DraftKind: the same at every depth of a draft."""

        def best_of(tokens: Tensor, counted: Tensor, _: Tensor | None) -> Any:
            yield self._best(draft, self._read(draft, tokens, counted))

        return measured(draft, best_of, samples, self._teaching)

    def write(self, draft: Any, folder: Path) -> None:
        """See DraftKind."""
        save(draft, folder)
        if self._proposed is not None:
            write_proposed_tokens(folder, self._proposed)


def check_draft_vocab(config: DistillConfig, target: Checkpoint) -> None:
    """Raise ExportError for a draft vocabulary that leaves out none of the target's tokens."""
    if config.draft_vocab is not None and config.draft_vocab >= target.vocab_size:
        raise ExportError(
            f"draft_vocab={config.draft_vocab} leaves out none of {target.vocab_size} tokens; "
            "use fewer, or leave it out"
        )


def coverage_of(config: DistillConfig) -> Coverage | None:
    """Return the term of the loss for beams, if it has one."""
    return None if config.coverage is None else Coverage(config.coverage)


def measured(
    draft: PreTrainedModel, best_of: BestByDepth, samples: list[HeldOutSamples], of: Teaching
) -> Acceptance:
    """Return the acceptance along samples, drawn as those of ``of`` are."""
    return acceptance_by_depth(draft, best_of, samples, of.held_out.sampling, of.device)


def save(draft: PreTrainedModel, folder: Path) -> None:
    """Write a model of transformers into a new folder."""
    with quiet_libraries():
        draft.save_pretrained(folder)
