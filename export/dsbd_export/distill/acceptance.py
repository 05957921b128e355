"""Held-out acceptance: how often speculative sampling would accept a token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from dsbd_export.distill.teacher import Teacher, TorchDevice
from dsbd_export.distill.work_folder import read_arrays
from dsbd_export.progress import Counter, Report
from dsbd_runtime.durable_files import put_in_place

TOP_K = 20
TEMPERATURE = 1.0
_LENGTH = 64  # of prompts, and of the samples behind them
_PROMPTS_A_FILE = 64  # sampled together: what a kill may cost


@dataclass(frozen=True)
class HeldOutSamples:
    """The target's own samples behind held-out prompts, with its distributions after top-k.

    Attributes:
        tokens: (num_prompts, length) int64. Without the last one that was drawn.
        ids: (num_prompts, num_new, top_k) int64. What the target draws from.
        probs: (num_prompts, num_new, top_k) float32. Its probabilities after top-k.
    """

    tokens: NDArray[np.int64]
    ids: NDArray[np.int64]
    probs: NDArray[np.float32]

    @property
    def prompts(self) -> NDArray[np.int64]:
        """The prompts, (num_prompts, prompt_length) int64."""
        return self.tokens[:, : self.tokens.shape[1] + 1 - self.ids.shape[1]]

    def write(self, file: Path) -> None:
        """Write them to a file, which appears when it is complete."""
        partial = file.with_suffix(".partial")
        with partial.open("wb") as opened:
            np.savez(opened, tokens=self.tokens, ids=self.ids, probs=self.probs)
        put_in_place(partial, file)

    @classmethod
    def read(cls, file: Path) -> HeldOutSamples:
        """Return those of ``write``."""
        return cls(*read_arrays(file, ("tokens", "ids", "probs")))

    def first(self, num_prompts: int) -> HeldOutSamples:
        """Return those of the first prompts."""
        return HeldOutSamples(
            self.tokens[:num_prompts], self.ids[:num_prompts], self.probs[:num_prompts]
        )


def held_out_samples(
    teacher: Teacher, prompts: NDArray[np.int64], num_new: int, top_k: int, seed: int
) -> HeldOutSamples:
    """Sample behind prompts, (num_prompts, length) int64, at temperature 1 with top-k."""
    _, labelled = teacher.sample(prompts, prompts.shape[1] + num_new, top_k, seed)
    probs = np.exp(labelled.log_probs[..., :top_k])
    return HeldOutSamples(
        labelled.tokens.astype(np.int64),
        labelled.ids[..., :top_k].astype(np.int64),
        probs / probs.sum(-1, keepdims=True),
    )


@dataclass(frozen=True)
class HeldOutPrompts:
    """Held-out prompts, and the target's samples behind them: drawn when they are needed, and kept.

    Attributes:
        prompts: (num_prompts, length) int64.
        folder: of the samples, ``_PROMPTS_A_FILE`` a file; what an earlier run drew is there.
        teacher: the target.
        seed: of the draws.
        report: gets lines.
    """

    prompts: NDArray[np.int64]
    folder: Path
    teacher: Teacher
    seed: int
    report: Report

    def samples(self, num_prompts: int | None = None) -> HeldOutSamples:
        """Return the samples behind the first prompts, or all; as many new tokens as a prompt."""
        begins = range(0, len(self.prompts[:num_prompts]), _PROMPTS_A_FILE)
        missing = [begin for begin in begins if not self._file(begin).exists()]
        phase = "sampling the target behind held-out prompts"
        if missing:
            self.report(phase)
        counter, total = Counter(phase, "prompts", self.report), len(missing) * _PROMPTS_A_FILE
        for number, begin in enumerate(missing, 1):
            self._draw(begin)
            counter.done(number * _PROMPTS_A_FILE, total)
        parts = [HeldOutSamples.read(self._file(begin)) for begin in begins]
        arrays = ((part.tokens, part.ids, part.probs) for part in parts)
        return HeldOutSamples(*map(np.concatenate, zip(*arrays, strict=True))).first(
            len(self.prompts[:num_prompts])
        )

    def _file(self, begin: int) -> Path:
        return self.folder / f"{begin:04d}.npz"

    def _draw(self, begin: int) -> None:
        self.folder.mkdir(exist_ok=True)
        rows = self.prompts[begin : begin + _PROMPTS_A_FILE]
        seed = int(np.random.default_rng((self.seed, 3, begin)).integers(2**62))
        drawn = held_out_samples(self.teacher, rows, rows.shape[1], TOP_K, seed)
        drawn.write(self._file(begin))


def prompt_length(context_length: int, num_held_out: int) -> int:
    """Return the length of prompts, and of the samples behind them."""
    return min(_LENGTH, context_length // 2, num_held_out // 2)


LogitsByDepth = Callable[[Tensor, int], Iterable[Tensor]]
"""Takes tokens (B, length); yields the logits behind the last so many of them, (B, num_new, V).

One set for each depth in the draft: of the first drafted token, of one behind a drafted one, ...
"""


def acceptance_rate(
    draft: PreTrainedModel, samples: HeldOutSamples, device: TorchDevice
) -> tuple[float, float]:
    """Return mean and standard error of the acceptance of a draft that is a model of its own."""

    def logits_of(tokens: Tensor, num_new: int) -> Iterable[Tensor]:
        yield draft(input_ids=tokens, use_cache=False, logits_to_keep=num_new).logits

    found = acceptance_by_depth(draft, logits_of, samples, device)
    return found.rate, found.error


@dataclass(frozen=True)
class Acceptance:
    """Held-out acceptance.

    Attributes:
        rate: of the first drafted token.
        error: its standard error, over prompts.
        by_depth: of the first drafted token, of one behind a drafted one, and so on.
    """

    rate: float
    error: float
    by_depth: tuple[float, ...]


@torch.inference_mode()
def acceptance_by_depth(
    draft: PreTrainedModel,
    logits_of: LogitsByDepth,
    samples: HeldOutSamples,
    device: TorchDevice,
) -> Acceptance:
    """Return sum min(p, q) along the samples, mean over positions and prompts.

    That sum is the probability that one drafted token is accepted by speculative sampling
    (Leviathan et al. 2023, 3.2), here at temperature 1 with top-k on both models.
    """
    num_new, top_k = samples.ids.shape[1:]
    was_training = draft.training
    draft.eval()
    rates = []
    at_once = device.rows_at_once(num_new, draft.config.vocab_size)
    for begin in range(0, len(samples.tokens), at_once):
        rows = slice(begin, begin + at_once)
        tokens, ids, p = (
            torch.from_numpy(array[rows]).to(device.name)
            for array in (samples.tokens, samples.ids, samples.probs)
        )
        by_depth = [
            torch.minimum(p, warped(logits.float(), top_k).gather(-1, ids)).sum(-1).mean(-1)
            for logits in logits_of(tokens, num_new)
        ]
        rates.append(torch.stack(by_depth, dim=-1))
    draft.train(was_training)
    by_prompt = torch.cat(rates).double().cpu().numpy()  # (num_prompts, num_depths)
    first = by_prompt[:, 0]
    error = first.std(ddof=1) / np.sqrt(len(first)) if len(first) > 1 else 0.0
    return Acceptance(float(first.mean()), float(error), tuple(by_prompt.mean(0).tolist()))


def warped(logits: Tensor, top_k: int) -> Tensor:
    """Return the distribution after top-k at temperature 1."""
    threshold = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < threshold, -torch.inf).softmax(-1)
