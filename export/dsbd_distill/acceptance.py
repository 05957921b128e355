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

from dsbd_distill.loss import selected
from dsbd_distill.teacher import (
    NUM_TOP,
    Labelled,
    Sampling,
    Teacher,
    TorchDevice,
    read_lengths,
)
from dsbd_distill.teacher_features import FeatureRows, unpacked
from dsbd_distill.work_folder import read_arrays
from dsbd_export.progress import Counter, Report
from dsbd_runtime.bundle_files.durable_files import put_in_place

COVERED = 4  # beams whose candidates are looked for among the draft's
MOST_HELD_OUT = 64  # tokens of a sample, and of the prompts of texts
_ARRAYS = ("tokens", "ids", "probs", "counted")  # of ``HeldOutSamples``
_PROMPTS_A_FILE = 64  # sampled together: what a kill may cost


@dataclass(frozen=True)
class HeldOutSamples:
    """The target's own samples behind held-out prompts, with what it drew them from.

    Attributes:
        tokens: (num_prompts, length) int64. Without the last one that was drawn.
        ids: (num_prompts, num_new, top_k) int64. What the target draws from, the best first.
        probs: (num_prompts, num_new, top_k) float32. Its probabilities, zero for what it cuts off.
        counted: (num_prompts, num_new) bool. Whether a place is behind a prompt, and before the end
            of what follows it.
        features: of each row where a draft reads them, see ``Labelled``.
    """

    tokens: NDArray[np.int64]
    ids: NDArray[np.int64]
    probs: NDArray[np.float32]
    counted: NDArray[np.bool_]
    features: FeatureRows | None = None

    def write(self, file: Path) -> None:
        """Write them to a file, which appears when it is complete."""
        partial = file.with_suffix(".partial")
        with partial.open("wb") as opened:
            arrays = {name: getattr(self, name) for name in _ARRAYS}
            if self.features is not None:
                arrays["features"] = np.concatenate(self.features)
            np.savez_compressed(opened, allow_pickle=False, **arrays)
        put_in_place(partial, file)

    @classmethod
    def read(cls, file: Path, *, with_features: bool = False) -> HeldOutSamples:
        """Return those of ``write``."""
        names = _ARRAYS if not with_features else (*_ARRAYS, "features")
        tokens, ids, probs, counted, *others = read_arrays(file, names)
        if not others:
            return cls(tokens, ids, probs, counted)
        [features] = others
        ends = np.cumsum(read_lengths(tokens, counted))
        return cls(tokens, ids, probs, counted, tuple(np.split(features, ends[:-1])))

    def first(self, num_prompts: int) -> HeldOutSamples:
        """Return those of the first prompts."""
        return self.part(slice(num_prompts))

    def part(self, rows: slice) -> HeldOutSamples:
        """Return those of some prompts."""
        return HeldOutSamples(
            self.tokens[rows],
            self.ids[rows],
            self.probs[rows],
            self.counted[rows],
            None if self.features is None else self.features[rows],
        )


def held_out_samples(labelled: Labelled, sampling: Sampling) -> HeldOutSamples:
    """Return samples that were drawn, with the probabilities that they were drawn with."""
    probs = sampling.probs(torch.from_numpy(labelled.log_probs[..., : sampling.top_k]))
    return HeldOutSamples(
        labelled.tokens.astype(np.int64),
        labelled.ids[..., : sampling.top_k].astype(np.int64),
        np.where(labelled.counted[..., None], probs.numpy(), 0.0),
        labelled.counted,
        labelled.features,
    )


@dataclass(frozen=True)
class HeldOutPrompts:
    """Held-out prompts, and the target's samples behind them: drawn when they are needed, and kept.

    Attributes:
        prompts: of texts all of one length, each int64.
        sampling: how the samples are drawn.
        num_new: tokens of a sample at most.
        ends: tokens that end one; none for texts, which go on.
        folder: of the samples, ``_PROMPTS_A_FILE`` a file; what an earlier run drew is there.
        teacher: the target.
        seed: of the draws.
        report: gets lines.
    """

    prompts: Sequence[NDArray[np.int64]]
    sampling: Sampling
    num_new: int
    ends: Sequence[int]
    folder: Path
    teacher: Teacher
    seed: int
    report: Report

    def samples(self, num_prompts: int | None = None) -> list[HeldOutSamples]:
        """Return the samples behind the first prompts, or all, in parts."""
        num_prompts = len(self.prompts) if num_prompts is None else num_prompts
        begins = range(0, len(self.prompts[:num_prompts]), _PROMPTS_A_FILE)
        missing = [begin for begin in begins if not self._file(begin).exists()]
        phase = "sampling the target's continuations of held-out prompts"
        if missing:
            self.report(phase)
        counter, total = Counter(phase, "prompts", self.report), len(missing) * _PROMPTS_A_FILE
        for number, begin in enumerate(missing, 1):
            self._draw(begin)
            counter.done(number * _PROMPTS_A_FILE, total)
        has_features = self.teacher.features is not None
        parts = [
            HeldOutSamples.read(self._file(begin), with_features=has_features) for begin in begins
        ]
        return [part.first(num_prompts - begin) for part, begin in zip(parts, begins, strict=True)]

    def _file(self, begin: int) -> Path:
        return self.folder / f"{begin:04d}.npz"

    def _draw(self, begin: int) -> None:
        self.folder.mkdir(exist_ok=True)
        rows = self.prompts[begin : begin + _PROMPTS_A_FILE]
        seed = int(np.random.default_rng((self.seed, 3, begin)).integers(2**62))
        drawn = self.teacher.answer(rows, self.num_new, self.sampling, self.ends, seed)
        held_out_samples(drawn, self.sampling).write(self._file(begin))


def prompt_length(context_length: int, num_held_out: int) -> int:
    """Return the length of prompts, and of the samples behind them."""
    return min(MOST_HELD_OUT, context_length // 2, num_held_out // 2)


@dataclass(frozen=True)
class Best:
    """The most probable tokens of a draft.

    Attributes:
        ids: (n, K) int64. The best first.
        logits: (n, K) float32. Theirs, up to a constant.
    """

    ids: Tensor
    logits: Tensor

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor | None = None) -> Best:
        """Return those of logits, (n, V).

        tokens: (V,) int64. Which they are; None: 0, 1, 2, ...
        """
        found = logits.float().topk(min(NUM_TOP, logits.shape[-1]))
        return cls(found.indices if tokens is None else tokens[found.indices], found.values)

    def probs_of(self, ids: Tensor, sampling: Sampling) -> Tensor:
        """Return the probabilities of tokens, (n, J), where the draft draws from its best."""
        probs = sampling.probs(self.logits)
        return ((ids[:, :, None] == self.ids[:, None]) * probs[:, None]).sum(-1)


BestByDepth = Callable[[Tensor, Tensor, Tensor | None], Iterable[Best]]
"""Takes tokens (B, length), which of the last of them count, (B, num_new) bool, and the target's
features of all but the last, (B, length - 1, width), if any; yields what the draft would propose
behind those that count.

One set for each depth in the draft: of the first drafted token, of one behind a drafted one, ...
"""


@dataclass(frozen=True)
class Acceptance:
    """Held-out acceptance.

    Attributes:
        rate: of the first drafted token.
        error: its standard error, over prompts.
        by_depth: of the first drafted token, of one behind a drafted one, and so on.
        greedy: share of places where both have the same most probable token.
        covered: mean share of the target's ``COVERED`` best tokens among as many of the draft's.
    """

    rate: float
    error: float
    by_depth: tuple[float, ...]
    greedy: float
    covered: float


def acceptance_of_model(
    draft: PreTrainedModel,
    samples: Sequence[HeldOutSamples],
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
    samples: Sequence[HeldOutSamples],
    sampling: Sampling,
    device: TorchDevice,
) -> Acceptance:
    """Return sum min(p, q) along the samples, mean over positions and prompts.

    That sum is the probability that one drafted token is accepted by speculative sampling
    (Leviathan et al. 2023, 3.2), here with the sampling of the samples on both models.
    """
    was_training = draft.training
    draft.eval()
    rates = []
    for part in samples:
        most = int(part.counted.sum(1).max())
        at_once = device.rows_at_once(most, draft.config.vocab_size)
        for begin in range(0, len(part.tokens), at_once):
            some = part.part(slice(begin, begin + at_once))
            tokens, ids, probs, counted = (
                torch.from_numpy(getattr(some, name)).to(device.name) for name in _ARRAYS
            )
            features = None
            if some.features is not None:
                features = unpacked(some.features, tokens.shape[1] - 1, device.name)
            rates.append(_rates(best_of, sampling, tokens, ids, probs, counted, features))
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
    probs: Tensor,
    counted: Tensor,
    features: Tensor | None,
) -> Tensor:
    """Return by prompt: agreement of the best, coverage, then acceptance at each depth."""
    prompt_of_place = counted.nonzero()[:, 0]
    ids, p = ids[counted], probs[counted]
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
