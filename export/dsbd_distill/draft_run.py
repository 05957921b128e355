"""The distillation of a draft, top to bottom: target, texts, first weights, training, record."""

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from dsbd_distill.acceptance import COVERED, Acceptance, Pool
from dsbd_distill.config import DistillConfig
from dsbd_distill.draft_kind import DraftKind, draft_kind
from dsbd_distill.given_sounds import Ask, read_by_draft, reads_sound
from dsbd_distill.loss import tv_weight
from dsbd_distill.sounds import Hear, check_spoken
from dsbd_distill.sources import decoder_layers, decoder_parameters
from dsbd_distill.teaching import Teaching, learns_few_answers, prepare_teaching
from dsbd_distill.training import Batch, Budget, Observer, Point, Schedule, Trainer, TrainingState
from dsbd_distill.work_folder import WorkFolder
from dsbd_export.chats import MOST_NEW
from dsbd_export.checkpoints.checkpoint import Checkpoint, limited_threads
from dsbd_export.checkpoints.model_config import text_config
from dsbd_export.config import ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_target
from dsbd_export.parts.draft_vocabulary import most_frequent_tokens
from dsbd_export.progress import Counter, Report, counted, shown
from dsbd_export.texts import check_readable, find_files
from dsbd_export.tokenizers.tokenizer_files import (
    highest_token_id,
    read_tokenizer,
    write_tokenizer_files,
)
from dsbd_forward.forward import Source
from dsbd_runtime.bundle_files.draft_record import (
    CurvePoint,
    DraftRecord,
    ExpectedSpeed,
    write_record,
)
from dsbd_runtime.bundle_files.durable_files import put_in_place

_NUM_MEASURED = 64  # maximum number of requests: their sounds are in memory


@dataclass(frozen=True, kw_only=True)
class TrainedDraft:
    """A trained draft whose speed will be measured."""

    target: Path  # checkpoint folder of the target, or its GGUF file
    folder: Path
    bundle: Path  # folder for an exported bundle, which is removed afterwards
    # held-out requests: a source (None if the target reads none) and token ids
    requests: Sequence[tuple[Source, list[int]]]
    are_chats: bool


MeasureSpeed = Callable[[TrainedDraft], tuple[list[ExpectedSpeed], str]]
"""Returns the expected speeds of a draft by number of beams, and the engines that were measured."""


def distill(
    config: DistillConfig,
    *,
    report: Report,
    measure_speed: MeasureSpeed | None,
    hear: Hear | None = None,
    ask: Ask | None = None,
    save_every: float = 60.0,
) -> DraftRecord:
    """Train a draft, leave it in ``config.output`` and return its measurements.

    After a kill or an error the work folder keeps the training, and the same command resumes it.

    measure_speed: measures the engines of the trained draft; None for a record without speeds.
    save_every: seconds of training that a kill may lose.

    Raises ExportError if an option, the target, the data or the output is not usable.
    """
    _check_absent(config.output)
    report("reading the target's config and tokenizer")
    options = ModelOptions(revision=config.revision, trust_remote_code=config.trust_remote_code)
    checkpoint = read_by_draft(config, open_target(config.target, options))
    _check_tokenizer(checkpoint)
    draft_kind(config, checkpoint).check(config, checkpoint)
    check_spoken(config, checkpoint)
    work = WorkFolder.next_to(config.output)
    files = [] if work.tokens.exists() else find_files(config.data, config.exclude)
    if not reads_sound(checkpoint):
        check_readable(files)
    training = f"{config.minutes:g} minutes" if config.steps is None else f"{config.steps:,} steps"
    report(
        f"training takes {training}; before it the data is tokenized and the target continues "
        f"held-out prompts{', after it the engines are measured' if measure_speed else ''}"
    )
    with limited_threads(config.num_threads), work.opened(config):
        teaching = prepare_teaching(config, checkpoint, files, work, report, hear, ask)
        record = _train(config, teaching, work, report, save_every)
        if measure_speed is not None:
            trained = TrainedDraft(
                target=checkpoint.source,
                folder=work.draft,
                bundle=work.path / "bundle",
                requests=_held_out_requests(teaching),
                are_chats=teaching.streams.has_chats,
            )
            del teaching  # the export needs its memory
            report("exporting target and draft, to measure their engines")
            speeds, measured_on = measure_speed(trained)
            record = dataclasses.replace(record, speeds=speeds, measured_on=measured_on)
        write_record(work.draft, record)
        _check_absent(config.output)
        put_in_place(work.draft, config.output)
    return record


def _check_absent(output: Path) -> None:
    if os.path.lexists(output):
        raise ExportError(f"{output} exists; remove it or choose another output")


def _held_out_requests(teaching: Teaching) -> list[tuple[Source, list[int]]]:
    prompts, reader = teaching.held_out.prompts[:_NUM_MEASURED], teaching.reader
    if reader is None:
        return [(None, prompt.tolist()) for prompt in prompts]
    return [reader.request_of(row) for row in reader.begun(prompts, teaching.held_out.seed)]


def _check_tokenizer(checkpoint: Checkpoint) -> None:
    """Raise ExportError for a tokenizer with ids that the target has no logits for."""
    highest_id = highest_token_id(read_tokenizer(checkpoint))
    if not 0 <= highest_id < checkpoint.vocab_size:
        raise ExportError(
            f"the tokenizer at {checkpoint.folder} has ids up to {highest_id}, but the target has "
            f"vocab_size {checkpoint.vocab_size}; give the tokenizer that it was trained with"
        )


def _train(
    config: DistillConfig, teaching: Teaching, work: WorkFolder, report: Report, save_every: float
) -> DraftRecord:
    """Leave the trained draft in the work folder and return its record, without speeds."""
    proposed = tokens_to_propose(config, teaching, work, report)
    kind = draft_kind(config, teaching.checkpoint)(config, teaching, proposed)
    draft = kind.first_draft().to(teaching.device.name)
    num_parameters, num_of_target = map(decoder_parameters, (draft, teaching.target))
    report(
        f"draft of {num_parameters:,} parameters ({num_parameters / num_of_target:.1%} of the "
        f"target's): {decoder_layers(draft)} layers of {text_config(draft.config).hidden_size}"
    )
    state = train_draft(config, teaching, kind, draft, work, report, save_every=save_every)
    acceptance = kind.acceptance(draft, teaching.held_out.samples())
    error = f"standard error {acceptance.error:.3f}"
    report(f"held-out acceptance {shown_acceptance(acceptance)} ({error})")
    _write_draft(kind, draft, teaching.checkpoint, work.draft)
    sampling = teaching.held_out.sampling
    names = [field.name for field in dataclasses.fields(CurvePoint)]
    curve = [CurvePoint(**{name: point[name] for name in names}) for point in state.history]
    return DraftRecord(
        target=teaching.checkpoint.source.resolve().name,
        num_parameters=num_parameters,
        num_target_parameters=num_of_target,
        acceptance=acceptance.rate,
        acceptance_error=acceptance.error,
        acceptance_by_depth=list(acceptance.by_depth) if len(acceptance.by_depth) > 1 else None,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        are_chats=teaching.streams.has_chats and teaching.reader is None,
        are_sources=teaching.reader is not None,
        greedy_acceptance=acceptance.greedy,
        coverage=acceptance.covered,
        coverage_beams=COVERED,
        num_proposed_tokens=None if proposed is None else len(proposed),
        seed=config.seed,
        steps=state.step,
        minutes=state.seconds / 60,
        num_train_tokens=len(teaching.streams.train),
        num_held_out_tokens=len(teaching.streams.held_out),
        num_train_prompts=len(teaching.streams.train_prompts),
        curve=curve,
        speeds=[],
        measured_on=None,
    )


def _write_draft(
    kind: DraftKind, draft: PreTrainedModel, checkpoint: Checkpoint, folder: Path
) -> None:
    """Write the draft in fp32 with the target's tokenizer, as dsbd-export reads checkpoints."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    kind.write(draft, partial)
    write_tokenizer_files(checkpoint, partial, lambda _: None)  # warnings were reported before
    for weights in partial.glob("*.safetensors"):  # the library writes them for the owner alone
        shutil.copymode(partial / "config.json", weights)
    shutil.rmtree(folder, ignore_errors=True)
    put_in_place(partial, folder)


_NUM_PROMPTS = 64  # held-out prompts for progress lines
_SHARE, _SECONDS = (
    0.025,
    20.0,
)  # between two progress lines at least this share of the training, and this time
_FIRST_ROUNDS = 4  # rounds of answers from which the proposed tokens are chosen
_FEW_ANSWERS, _FEW_STEPS = 8, 64  # answers per step, steps per round; see ``learns_few_answers``
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

    rate = _LEARNING_RATE * min(1.0, _LEARNED_AT / text_config(draft.config).hidden_size)
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
        max_new = teaching.checkpoint.context_length - reader.most_begin
        others = {"most_new": min(MOST_NEW, max_new), "num_answers": reader.answers_a_round}
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
    """Return the tokens that the draft proposes, (n,) int64 ascending; None: all.

    These are the most frequent tokens of the texts and of the target's answers.
    """
    if config.draft_vocab is None:
        return None
    checkpoint, streams = teaching.checkpoint, teaching.streams
    counts = np.zeros(checkpoint.vocab_size)
    reads_sources = (
        teaching.reader is not None
    )  # tokens of sources may differ from those of targets
    for tokens in () if reads_sources else (streams.train, streams.train_prompts.tokens):
        counts += np.bincount(tokens, minlength=len(counts))
    if streams.has_chats:
        phase = "sampling first answers of the target, for the tokens that the draft proposes"
        report(phase)
        pool = pool_of(config, teaching, work, splits_batches=False)
        expected = np.zeros(len(counts))
        num_rounds = 1
        if (reader := teaching.reader) is not None:  # no source is used twice
            num_rounds = -(-len(streams.train_prompts) // reader.answers_a_round)
        rounds = range(min(_FIRST_ROUNDS, num_rounds))
        for answers in map(pool.answers_of, counted(rounds, Counter(phase, "rounds", report))):
            ids, log_probs = answers.ids[answers.counted], answers.log_probs[answers.counted]
            expected += np.bincount(ids.ravel(), np.exp(log_probs).ravel(), len(counts))
        counts += expected * max(1.0, counts.sum() / max(expected.sum(), 1.0))
    ranks = (counts * (2**40 / max(counts.sum(), 1.0))).astype(np.int64)
    proposed = most_frequent_tokens(ranks, checkpoint.eos_token_ids, config.draft_vocab)
    share = counts[proposed].sum() / max(counts.sum(), 1.0)
    report(
        f"the draft proposes {len(proposed):,} of {len(counts):,} tokens, {share:.2%} of what was "
        "seen"
    )
    return proposed


def _observer(
    kind: DraftKind, draft: PreTrainedModel, teaching: Teaching, report: Report
) -> Observer:
    samples = teaching.held_out.samples(_NUM_PROMPTS)

    def observe(state: TrainingState) -> Point | None:
        if state.progress < 1.0 and state.history:
            last = state.history[-1]
            share, seconds = state.progress - last["progress"], state.seconds - last["seconds"]
            if share < _SHARE or seconds < _SECONDS:
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
