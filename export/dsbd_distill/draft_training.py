"""Training of a draft on the pool: budget, learning rate, progress lines."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from dsbd_distill.acceptance import Acceptance
from dsbd_distill.config import DistillConfig
from dsbd_distill.draft_kind import DraftKind
from dsbd_distill.loss import tv_weight
from dsbd_distill.pool import Pool
from dsbd_distill.teaching import Teaching, learns_few_answers
from dsbd_distill.training import (
    Batch,
    Budget,
    Observer,
    Point,
    Schedule,
    Trainer,
    TrainingState,
)
from dsbd_distill.work_folder import WorkFolder
from dsbd_export.chats import MOST_NEW
from dsbd_export.parts.draft_vocabulary import most_frequent_tokens
from dsbd_export.progress import Counter, Report, counted, shown

_NUM_PROMPTS = 64  # held-out prompts for progress lines
_SHARE, _SECONDS = 0.025, 20.0  # of the training: both pass between two progress lines
_FIRST_ROUNDS = 4  # of sources, from which the proposed tokens are chosen
_FEW_ANSWERS, _FEW_STEPS = 8, 64  # per step and round, see ``learns_few_answers``
_LEARNING_RATE, _LEARNED_AT = 5e-3, 160  # peak at this hidden size; wider drafts learn slower


def train_draft(
    config: DistillConfig,
    teaching: Teaching,
    kind: DraftKind,
    draft: PreTrainedModel,
    work: WorkFolder,
    report: Report,
    *,
    save_every: float,
) -> TrainingState:
    """Train to the end of the budget, from the latest checkpoint if there is one."""
    device = teaching.device
    pool = pool_of(config, teaching, work, splits_batches=not kind.bounds_logits)

    def batches_at(step: int, progress: float) -> list[Batch]:
        weight = torch.tensor(tv_weight(progress), device=device.name)
        return [(*batch, weight) for batch in pool.batches(step)]

    rate = _LEARNING_RATE * min(1.0, _LEARNED_AT / draft.config.hidden_size)
    budget = Budget(steps=config.steps, seconds=60 * config.minutes)
    schedule = Schedule(learning_rate=rate)
    trainer = Trainer(draft, schedule, budget, work.checkpoint, save_every=save_every)
    if trainer.state.step:
        report(f"going on from step {trainer.state.step:,}")
    return trainer.run(batches_at, kind.loss, _observer(kind, draft, teaching, report))


def pool_of(
    config: DistillConfig, teaching: Teaching, work: WorkFolder, *, splits_batches: bool
) -> Pool:
    """Return the pool of a distillation."""
    others: dict[str, Any] = {}
    if learns_few_answers(config, teaching.streams):
        others = {"answers_a_step": _FEW_ANSWERS, "steps_a_round": _FEW_STEPS}
    if (reader := teaching.reader) is not None:
        most = teaching.checkpoint.context_length - reader.most_begin
        others = {"most_new": min(MOST_NEW, most), "num_answers": reader.answers_a_round}
    return Pool(
        folder=work.pool,
        texts=teaching.streams.train,
        prompts=teaching.streams.train_prompts,
        teacher=teaching.teacher,
        ends=teaching.checkpoint.eos_token_ids,
        context_length=teaching.checkpoint.context_length,
        splits_batches=splits_batches,
        seed=config.seed,
        **others,
    )


def tokens_to_propose(
    config: DistillConfig, teaching: Teaching, work: WorkFolder, report: Report
) -> NDArray[np.int64] | None:
    """Return the most frequent tokens, (n,) int64 ascending, for the draft to propose, or None."""
    if config.draft_vocab is None:
        return None
    checkpoint, streams = teaching.checkpoint, teaching.streams
    counts = np.zeros(checkpoint.vocab_size)
    reads_sources = teaching.reader is not None  # their tokens may differ from those of targets
    for tokens in () if reads_sources else (streams.train, streams.train_prompts.tokens):
        counts += np.bincount(tokens, minlength=len(counts))
    if streams.has_chats:
        phase = "sampling first answers of the target, for the tokens that the draft proposes"
        report(phase)
        pool = pool_of(config, teaching, work, splits_batches=False)
        expected = np.zeros(len(counts))
        rounds = range(_num_rounds(teaching))
        for answers in map(pool.answers_of, counted(rounds, Counter(phase, "rounds", report))):
            ids, log_probs = answers.ids[answers.counted], answers.log_probs[answers.counted]
            expected += np.bincount(ids.ravel(), np.exp(log_probs).ravel(), len(counts))
        counts += expected * max(1.0, counts.sum() / max(expected.sum(), 1.0))
    ranks = (counts * (2**40 / max(counts.sum(), 1.0))).astype(np.int64)
    found = most_frequent_tokens(ranks, checkpoint.eos_token_ids, config.draft_vocab)
    share = counts[found].sum() / max(counts.sum(), 1.0)
    report(
        f"the draft proposes {len(found):,} of {len(counts):,} tokens, {share:.2%} of what was seen"
    )
    return found


def _num_rounds(teaching: Teaching) -> int:
    """Return how many rounds the proposed tokens are chosen from: no source is used twice."""
    if teaching.reader is None:
        return 1
    num_prompts, a_round = len(teaching.streams.train_prompts), teaching.reader.answers_a_round
    return min(_FIRST_ROUNDS, -(-num_prompts // a_round))


def _observer(
    kind: DraftKind, draft: PreTrainedModel, teaching: Teaching, report: Report
) -> Observer:
    """Return an observer that measures and reports acceptance from time to time."""
    samples = teaching.held_out.samples(_NUM_PROMPTS)

    def observe(state: TrainingState) -> Point | None:
        if state.progress < 1.0 and not _is_due(state):
            return None
        acceptance = kind.acceptance(draft, samples)
        loss = sum(state.losses) / len(state.losses) if state.losses else None
        loss_text = "untrained" if loss is None else f"loss {loss:.3f}"
        share = min(state.progress, 1.0)
        left = state.seconds * (1 - share) / share if share else 0.0
        report(
            f"step {state.step:,}, {share:.0%}, {state.seconds / 60:.1f} min: {loss_text}, "
            f"acceptance {shown_acceptance(acceptance)}"
            f"{f', about {shown(left)} left' if left else ''}"
        )
        return {
            "step": state.step,
            "seconds": state.seconds,
            "progress": state.progress,
            "loss": loss,
            "acceptance": acceptance.rate,
        }

    return observe


def shown_acceptance(acceptance: Acceptance) -> str:
    """Return the rate in words, or the rates by depth."""
    return ", then ".join(f"{rate:.3f}" for rate in acceptance.by_depth)


def _is_due(state: TrainingState) -> bool:
    if not state.history:
        return True
    last = state.history[-1]
    share, seconds = state.progress - last["progress"], state.seconds - last["seconds"]
    return bool(share >= _SHARE and seconds >= _SECONDS)
