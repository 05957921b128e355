"""Distillation of the draft: the target's own samples, its cached top probabilities, the loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

NUM_TEACHER_TOKENS = 32


@torch.inference_mode()
def sample_continuations(
    target: nn.Module, prompts: NDArray[np.int64], length: int, top_k: int, seed: int
) -> NDArray[np.int64]:
    """Sample from the target (temperature 1, top-k) until every row has ``length`` tokens.

    prompts: (num_prompts, prompt_length) int64. Returns (num_prompts, length) int64. The
    end-of-sequence token does not stop a row: what follows it is a new document.
    """
    torch.manual_seed(seed)
    ids = torch.from_numpy(prompts)
    past, pieces = None, [ids]
    for _ in range(length - prompts.shape[1]):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = target(input_ids=pieces[-1], past_key_values=past, use_cache=True)
        past = out.past_key_values
        top = out.logits[:, -1].float().topk(top_k)
        choice = torch.multinomial(top.values.softmax(-1), 1)
        pieces.append(top.indices.gather(-1, choice))
    return torch.cat(pieces, dim=1).numpy()


@torch.inference_mode()
def teacher_probabilities(
    target: nn.Module, sequences: NDArray[np.int64], folder: Path, batch_size: int
) -> None:
    """Write tokens and the target's most probable next tokens of every position to ``folder``.

    sequences: (num_sequences, length) int64. Files: tokens.npy (num_sequences, length) uint16;
    ids.npy and log_probs.npy (num_sequences, length, NUM_TEACHER_TOKENS) uint16 and float16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shape = (*sequences.shape, NUM_TEACHER_TOKENS)
    ids = np.lib.format.open_memmap(folder / "ids.npy", "w+", np.uint16, shape)
    log_probs = np.lib.format.open_memmap(folder / "log_probs.npy", "w+", np.float16, shape)
    for start in range(0, len(sequences), batch_size):
        batch = torch.from_numpy(sequences[start : start + batch_size])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = target(input_ids=batch, use_cache=False).logits
        logits = logits.float()
        top = logits.topk(NUM_TEACHER_TOKENS)
        values = top.values - logits.logsumexp(-1, keepdim=True)
        ids[start : start + batch_size] = top.indices.numpy().astype(np.uint16)
        log_probs[start : start + batch_size] = values.numpy().astype(np.float16)
    np.save(folder / "tokens.npy", sequences.astype(np.uint16))  # last: marks the set as whole


class TeacherSet:
    """The files of ``teacher_probabilities``, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self.tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self.ids = np.load(folder / "ids.npy", mmap_mode="r")
        self.log_probs = np.load(folder / "log_probs.npy", mmap_mode="r")

    def batch(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens (B, length), ids and log-probabilities (B, length, K) of ``rows``."""
        return (
            torch.from_numpy(self.tokens[rows].astype(np.int64)),
            torch.from_numpy(self.ids[rows].astype(np.int64)),
            torch.from_numpy(self.log_probs[rows].astype(np.float32)),
        )


def distillation_loss(draft: nn.Module, batch: tuple[Tensor, ...], tv_weight: Tensor) -> Tensor:
    """Return KL(p || q) mixed with the total variation of p and q, mean over positions.

    p: target, q: draft, over the target's top tokens and one bucket for all others. One minus
    the total variation is the speculative acceptance rate (Leviathan et al. 2023, 3.2), hence
    the second term; it starts weak, because its gradient vanishes where p and q are disjoint.
    """
    tokens, ids, target_log_probs = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = draft(input_ids=tokens, use_cache=False).logits
    log_q = logits.float().log_softmax(-1).gather(-1, ids)
    p = target_log_probs.exp()
    rest_p = (1 - p.sum(-1)).clamp_min(1e-6)
    q = log_q.exp()
    rest_q = (1 - q.sum(-1)).clamp_min(1e-6)
    kl = (p * (target_log_probs - log_q)).sum(-1) + rest_p * (rest_p.log() - rest_q.log())
    tv = 0.5 * ((p - q).abs().sum(-1) + (rest_p - rest_q).abs())
    return ((1 - tv_weight) * kl + tv_weight * tv).mean()


class Pair(nn.Module):
    """Target and draft as one module, to be trained together."""

    def __init__(self, target: nn.Module, draft: nn.Module) -> None:
        super().__init__()
        self.target = target
        self.draft = draft


def mutual_loss(pair: nn.Module, tokens: Tensor, num_corpus: Tensor, agreement: Tensor) -> Tensor:
    """Return the target's cross entropy plus ``agreement`` times the distance of both models.

    The distance is KL(p || q) and the total variation, 0.4 and 0.6, and both models follow its
    gradient (deep mutual learning, Zhang et al. 2018): the draft learns the target's
    distribution, and of those that explain the corpus nearly as well the target learns one that a
    draft can follow.

    tokens: (B, length) int64, of which the rows before ``num_corpus`` are from the corpus; the
    others, the target's own samples, teach agreement only.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        target_logits = pair.target(input_ids=tokens, use_cache=False).logits
        draft_logits = pair.draft(input_ids=tokens, use_cache=False).logits
    log_p = target_logits.float().log_softmax(-1)
    log_q = draft_logits.float().log_softmax(-1)
    nll = -log_p[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1).mean(-1)  # (B,)
    is_corpus = (torch.arange(len(tokens)) < num_corpus).float()
    cross_entropy = (nll * is_corpus).sum() / num_corpus
    p = log_p.exp()
    kl = (p * (log_p - log_q)).sum(-1).mean()
    tv = 0.5 * (p - log_q.exp()).abs().sum(-1).mean()
    return cross_entropy + agreement * (0.4 * kl + 0.6 * tv)


@torch.inference_mode()
def held_out_loss(model: nn.Module, sequences: NDArray[np.int64]) -> float:
    """Return the mean cross entropy in nats per token of (num_sequences, length) int64."""
    losses = []
    for row in torch.from_numpy(sequences).split(8):
        logits = model(input_ids=row, use_cache=False).logits[:, :-1].float()
        losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten()))
    return float(torch.stack(losses).mean())


def warped(logits: Tensor, top_k: int) -> Tensor:
    """Return the distribution after top-k at temperature 1."""
    threshold = logits.topk(top_k).values[..., -1:]
    return logits.masked_fill(logits < threshold, -torch.inf).softmax(-1)


@torch.inference_mode()
def acceptance_rate(
    target: nn.Module, draft: nn.Module, prompts: NDArray[np.int64], new_tokens: int, top_k: int
) -> tuple[float, float]:
    """Return mean and standard error of sum min(p, q) along the target's own samples.

    That sum is the probability that one drafted token is accepted by speculative sampling
    (Leviathan et al. 2023, 3.2), here at temperature 1 with top-k on both models. The standard
    error is over prompts.
    """
    length = prompts.shape[1]
    ids = sample_continuations(target, prompts, length + new_tokens, top_k, seed=1)
    rates = []
    for row in torch.from_numpy(ids).split(8):
        p = warped(target(input_ids=row, use_cache=False).logits[:, length - 1 : -1], top_k)
        q = warped(draft(input_ids=row, use_cache=False).logits[:, length - 1 : -1], top_k)
        rates.append(torch.minimum(p, q).sum(-1).mean(-1))
    by_prompt = torch.cat(rates).double().numpy()
    return float(by_prompt.mean()), float(by_prompt.std(ddof=1) / np.sqrt(len(by_prompt)))
