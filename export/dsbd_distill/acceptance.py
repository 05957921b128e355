"""Held-out acceptance: how often speculative sampling would accept a token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from dsbd_distill.lesson import Lesson
from dsbd_distill.loss import Best, selected
from dsbd_distill.teacher import Sampling, Teacher, TorchDevice
from dsbd_export.progress import Counter, Report

COVERED = 4  # best tokens of the target, looked up among as many of the draft
MOST_HELD_OUT = 64  # tokens of a sample, and of the prompts of texts
_PROMPTS_A_FILE = 64  # sampled together: a kill loses at most these


@dataclass(frozen=True)
class HeldOutPrompts:
    """Held-out prompts and the target's samples after them: drawn when first needed, stored."""

    prompts: Sequence[NDArray[np.int64]]  # int64 each; those of texts have one length
    sampling: Sampling
    num_new: int  # tokens of a sample at most
    ends: Sequence[int]
    folder: Path  # of the stored samples, ``_PROMPTS_A_FILE`` in a file
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
    """Return the length of prompts of texts, and of the samples after them."""
    return min(MOST_HELD_OUT, context_length // 2, num_held_out // 2)


BestByDepth = Callable[[Tensor, Tensor, Tensor | None], Iterable[Best]]
"""Yields the draft's proposals after the tokens that count, one ``Best`` for each depth in a draft:
of the first drafted token, of the next, ...

It takes tokens (B, length), which of the last of them count, (B, num_new) bool, and the target's
features of all but the last, (B, length - 1, width), or None.
"""


@dataclass(frozen=True)
class Acceptance:
    """Held-out acceptance."""

    rate: float  # of the first drafted token
    error: float
    by_depth: tuple[float, ...]  # of the first drafted token, of the second, and so on
    greedy: float  # share of places where both have the same most probable token
    # mean share of the target's ``COVERED`` best tokens among as many of the draft's
    covered: float


def acceptance_of_model(
    draft: PreTrainedModel,
    samples: Sequence[Lesson],
    sampling: Sampling,
    device: TorchDevice,
) -> Acceptance:
    """Return the acceptance of a draft that is a causal language model of its own."""

    def best_of(tokens: Tensor, counted: Tensor, _: Tensor | None) -> Iterable[Best]:
        found = draft(input_ids=tokens, use_cache=False, logits_to_keep=counted.shape[1])
        yield Best.of(selected(found.logits, counted))

    return acceptance_by_depth(draft, best_of, samples, sampling, device)


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
        most = int(part.counted.sum(1).max())
        at_once = device.rows_at_once(most, draft.config.vocab_size)
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
            found = (ids[:, :COVERED, None] == best.ids[:, None, :COVERED]).any(-1)
            columns.append(found.float().mean(-1))
        columns.append(torch.minimum(p, best.probs_of(ids, sampling)).sum(-1))
    sums = torch.zeros(len(tokens), len(columns), device=tokens.device)
    sums.index_add_(0, prompt_of_place, torch.stack(columns, dim=-1))
    return sums / counted.sum(-1, keepdim=True)
