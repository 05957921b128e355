"""Rows that the target labels: the pool that a draft is trained on, and held-out acceptance.

A pool has rounds on disk, which are made when they are needed. For texts, a round holds windows of
the texts, the target's samples after such windows, and long windows. For chats and sources, it
holds the target's answers. A round depends only on the seed and the round's number. Acceptance is
how often speculative sampling would accept a token of a draft.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from dsbd_distill.lesson import BYTES_PER_FEATURE, Lesson
from dsbd_distill.loss import Best
from dsbd_distill.teacher import (
    CHAT_SAMPLING,
    TEXT_SAMPLING,
    Sampling,
    Teacher,
    TorchDevice,
    num_labels,
)
from dsbd_export.chats import MOST_NEW, NO_PROMPTS, Prompts
from dsbd_export.checkpoints.model_config import text_config
from dsbd_export.progress import Counter, Report
from dsbd_export.texts import Tokens, windows

STEPS_A_ROUND = 96
_NUM_ROUNDS = 32  # rounds kept on disk
_MOST_FEATURE_BYTES = 4 * 2**30  # maximum size of the features of all kept rounds
_LENGTH = {
    "texts": 256,
    "samples": 128,
    "long": 2048,
}  # tokens of a row; fewer if the context is shorter
_ROWS = {"texts": 64, "samples": 128, "long": 4, "answers": 64}  # rows of a round
_BATCH = {"texts": 4, "samples": 8, "long": 1, "answers": 16}  # rows of a step: few learn fastest
_LONG_EVERY = 8  # one step in eight has long rows, the others have both short kinds
_LEAST_PROMPT = 8  # tokens of the prompt of a sample; a prompt is at most half of its row


@dataclass(frozen=True)
class Pool:
    """Rows to learn from, stored in rounds."""

    folder: Path  # the rounds are stored here
    texts: Tokens
    teacher: Teacher  # labels and samples
    context_length: int  # tokens of the longest row
    seed: int  # for all random draws
    prompts: Prompts = NO_PROMPTS
    ends: Sequence[int] = ()  # tokens that end an answer
    # maximum tokens of an answer; None: the context after the longest prompt, at most ``MOST_NEW``
    most_new: int | None = None
    num_answers: int = _ROWS["answers"]
    answers_a_step: int = _BATCH["answers"]  # answers of a round that one step learns from
    steps_a_round: int = STEPS_A_ROUND  # steps until the next round is made
    splits_batches: bool = True  # whether batches have few rows, to bound the draft's logits

    def batches(self, step: int) -> list[tuple[Tensor, ...]]:
        """Return the batches of a step, all of about the same number of labels."""
        newest = step // self.steps_a_round
        self._make(newest)
        rng = np.random.default_rng((self.seed, step, 1))
        number = int(rng.integers(max(0, newest - self.num_rounds + 1), newest + 1))
        self._make(number)
        kinds = self._kinds_of(step)
        return [batch for kind in kinds for batch in self._drawn(number, kind, rng)]

    @property
    def num_rounds(self) -> int:
        """Return how many rounds are kept: at least one, fewer if features are wide."""
        features = self.teacher.features
        if features is None:
            return _NUM_ROUNDS
        num_tokens = 0.0
        if len(self.texts):
            num_tokens += sum(_ROWS[kind] * self._length(kind) for kind in _LENGTH)
        if len(self.prompts):
            of_prompts = len(self.prompts.tokens) / len(self.prompts)
            num_tokens += self.num_answers * (of_prompts + MOST_NEW)
        a_round = num_tokens * features.width * BYTES_PER_FEATURE
        return int(min(max(_MOST_FEATURE_BYTES // a_round, 1), _NUM_ROUNDS))

    def answers_of(self, number: int) -> Lesson:
        """Return the target's answers in a round, which is made if it is missing."""
        self._make(number)
        return self._read(number, "answers")

    def _kinds_of(self, step: int) -> tuple[str, ...]:
        """Return the kinds of rows of a step; chats and texts take turns."""
        if len(self.prompts) and (not len(self.texts) or step % 2 == 0):
            return ("answers",)
        return ("long",) if step % _LONG_EVERY == _LONG_EVERY - 1 else ("texts", "samples")

    def _drawn(self, number: int, kind: str, rng: np.random.Generator) -> list[tuple[Tensor, ...]]:
        rows = self._read(number, kind)
        max_rows = self.answers_a_step if kind == "answers" else _BATCH[kind]
        size = min(max_rows, len(rows.tokens))
        chosen = np.sort(rng.choice(len(rows.tokens), size, replace=False))
        if not self.splits_batches:
            return [rows.batch(chosen, self.teacher.device.name)]
        at_once = self.teacher.device.rows_at_once(rows.ids.shape[1], self.teacher.vocab_size)
        parts = np.array_split(chosen, -(-len(chosen) // at_once))
        return [rows.batch(part, self.teacher.device.name) for part in parts]

    def _file(self, number: int, kind: str) -> Path:
        return self.folder / f"{number:06d}_{kind}.npz"

    def _read(self, number: int, kind: str) -> Lesson:
        has_features = self.teacher.features is not None
        return Lesson.read(self._file(number, kind), with_features=has_features)

    def _make(self, number: int) -> None:
        """Write a round unless it exists."""
        has_features = self.teacher.features is not None
        kinds = [*_LENGTH] * bool(len(self.texts)) + ["answers"] * bool(len(self.prompts))
        files = [self._file(number, kind) for kind in kinds]
        if all(Lesson.is_stored(file, with_features=has_features) for file in files):
            return
        self.folder.mkdir(exist_ok=True)
        rng = np.random.default_rng((self.seed, number, 0))
        made = self._texts_round(rng) if len(self.texts) else {}
        made |= self._chats_round(rng) if len(self.prompts) else {}
        for kind, rows in made.items():
            narrow = rows.log_probs.astype(np.float16)
            dataclasses.replace(rows, log_probs=narrow).write(self._file(number, kind))
        for old in self.folder.glob("*.np[yz]"):
            if int(old.stem[:6]) <= number - self.num_rounds:
                old.unlink()  # a resumed training that needs it makes it again

    def _length(self, kind: str) -> int:
        return min(_LENGTH[kind], self.context_length, len(self.texts))

    def _texts_round(self, rng: np.random.Generator) -> dict[str, Lesson]:
        labelled = {}
        for kind in ("texts", "long"):
            length = self._length(kind)
            rows = windows(self.texts, _ROWS[kind], length, rng)
            labelled[kind] = self.teacher.label(rows, num_labels(length, self.teacher.vocab_size))
        length = self._length("samples")
        prompt_length = int(rng.integers(min(_LEAST_PROMPT, length // 2), length // 2 + 1))
        prompts = windows(self.texts, _ROWS["samples"], prompt_length, rng)
        seed = int(rng.integers(2**62))
        _, labelled["samples"] = self.teacher.sample(prompts, length, TEXT_SAMPLING, seed)
        return labelled

    def _chats_round(self, rng: np.random.Generator) -> dict[str, Lesson]:
        prompts = self.prompts.chosen(self.num_answers, rng)
        num_new = self.most_new
        if num_new is None:
            num_new = min(MOST_NEW, self.context_length - max(map(len, prompts)))
        seed = int(rng.integers(2**62))
        answers = self.teacher.answer(prompts, num_new, CHAT_SAMPLING, self.ends, seed)
        return {"answers": answers}


COVERED = 4  # best tokens of the target that are looked up among the draft's best ``COVERED``
MOST_HELD_OUT = 64  # tokens of a sample, and of a prompt if the data is texts
_PROMPTS_A_FILE = 64  # prompts sampled together: a kill loses at most these samples


@dataclass(frozen=True)
class HeldOutPrompts:
    """Held-out prompts and the target's samples after them: drawn when first needed, stored."""

    prompts: Sequence[
        NDArray[np.int64]
    ]  # int64 each; prompts cut from texts all have the same length
    sampling: Sampling
    num_new: int  # tokens of a sample at most
    ends: Sequence[int]
    folder: Path  # stored samples, ``_PROMPTS_A_FILE`` per file
    teacher: Teacher
    seed: int
    report: Report

    def samples(self, num_prompts: int | None = None) -> list[Lesson]:
        """Return the samples after the first prompts, or all, in parts."""
        num_prompts = len(self.prompts) if num_prompts is None else num_prompts
        begins = range(0, len(self.prompts[:num_prompts]), _PROMPTS_A_FILE)
        has_features = self.teacher.features is not None
        missing = [
            begin
            for begin in begins
            if not Lesson.is_stored(self._file(begin), with_features=has_features)
        ]
        phase = "sampling the target's continuations of held-out prompts"
        if missing:
            self.folder.mkdir(exist_ok=True)
            self.report(phase)
        counter, total = Counter(phase, "prompts", self.report), len(missing) * _PROMPTS_A_FILE
        for number, begin in enumerate(missing, 1):
            rows = self.prompts[begin : begin + _PROMPTS_A_FILE]
            seed = int(np.random.default_rng((self.seed, 3, begin)).integers(2**62))
            drawn = self.teacher.answer(rows, self.num_new, self.sampling, self.ends, seed)
            drawn.write(self._file(begin))
            counter.done(number * _PROMPTS_A_FILE, total)
        return [
            Lesson.read(self._file(begin), with_features=has_features).at(
                slice(num_prompts - begin)
            )
            for begin in begins
        ]

    def _file(self, begin: int) -> Path:
        return self.folder / f"{begin:04d}.npz"


def prompt_length(context_length: int, num_held_out: int) -> int:
    """Return the number of tokens of a prompt cut from texts, and of the sample after it."""
    return min(MOST_HELD_OUT, context_length // 2, num_held_out // 2)


BestByDepth = Callable[[Tensor, Tensor, Tensor | None], Iterable[Best]]
"""Yields the draft's proposals after the tokens that count, one ``Best`` for each depth in a draft:
of the first drafted token, of the next, ...

It takes tokens, (B, length); which of the last num_new tokens count, (B, num_new) bool; and the
target's features of all tokens except the last, (B, length - 1, width), or None.
"""


@dataclass(frozen=True)
class Acceptance:
    """Held-out acceptance."""

    rate: float  # acceptance of the first drafted token
    error: float
    by_depth: tuple[float, ...]  # rates of the first drafted token, the second, and so on
    greedy: float  # share of places where both have the same most probable token
    # mean share of the target's ``COVERED`` best tokens among as many of the draft's
    covered: float


@torch.inference_mode()
def acceptance_by_depth(
    draft: PreTrainedModel,
    best_of: BestByDepth,
    samples: Sequence[Lesson],
    sampling: Sampling,
    device: TorchDevice,
) -> Acceptance:
    """Return sum min(p, q) along the samples, the acceptance (Leviathan et al. 2023, 3.2)."""
    was_training = draft.training
    draft.eval()
    rates = []
    for part in samples:
        max_counted = int(part.counted.sum(1).max())
        at_once = device.rows_at_once(max_counted, text_config(draft.config).vocab_size)
        for begin in range(0, len(part.tokens), at_once):
            rows = np.arange(len(part.tokens))[begin : begin + at_once]
            rates.append(_rates(best_of, sampling, *part.batch(rows, device.name)))
    draft.train(was_training)
    by_prompt = torch.cat(rates).double().cpu().numpy()  # (num_prompts, num_depths + 2)
    greedy, covered, *by_depth = by_prompt.mean(0).tolist()
    first = by_prompt[:, 2]
    error = first.std(ddof=1) / np.sqrt(len(first)) if len(first) > 1 else 0.0
    return Acceptance(by_depth[0], float(error), tuple(by_depth), greedy, covered)


def _rates(
    best_of: BestByDepth,
    sampling: Sampling,
    tokens: Tensor,
    ids: Tensor,
    log_probs: Tensor,
    counted: Tensor,
    features: Tensor | None = None,
) -> Tensor:
    """Return for each prompt: agreement of the best, coverage, then acceptance at each depth."""
    prompt_of_place = counted.nonzero()[:, 0]
    ids = ids[counted][:, : sampling.top_k]
    p = sampling.probs(log_probs[counted][:, : sampling.top_k])
    columns = []
    for depth, best in enumerate(best_of(tokens, counted, features)):
        if depth == 0:
            columns.append((best.ids[:, 0] == ids[:, 0]).float())
            is_covered = (ids[:, :COVERED, None] == best.ids[:, None, :COVERED]).any(-1)
            columns.append(is_covered.float().mean(-1))
        columns.append(torch.minimum(p, best.probs_of(ids, sampling)).sum(-1))
    sums = torch.zeros(len(tokens), len(columns), device=tokens.device)
    sums.index_add_(0, prompt_of_place, torch.stack(columns, dim=-1))
    return sums / counted.sum(-1, keepdim=True)
