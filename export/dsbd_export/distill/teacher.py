"""The target as a teacher: its own samples, and its most probable next tokens of any text.

The target's distributions are kept as the ``NUM_TOP`` most probable tokens and one bucket for all
others. Its logits exist for a few rows at a time, ``_MOST_LOGITS`` numbers at most.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dsbd_export.model_loading import cache_name

NUM_TOP = 32
_MOST_LOGITS = 2**26  # numbers of one call, 256 MiB in fp32
_FEW_LOGITS = 2**23  # the same on a CPU, whose caches they should fit
_MOST_CACHE_BYTES = 2**29  # of keys and values while sampling


@dataclass(frozen=True)
class TorchDevice:
    """Where models are trained and run.

    Attributes:
        name: of torch: "cpu" or "cuda".
        uses_bf16: whether products are computed in bf16, which the hardware must be good at.
    """

    name: str
    uses_bf16: bool

    def rows_at_once(self, num_labels: int, vocab_size: int) -> int:
        """Return how many rows with logits of so many tokens are computed together."""
        numbers = _FEW_LOGITS if self.name == "cpu" else _MOST_LOGITS
        return max(1, numbers // (num_labels * vocab_size))

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute products in bf16 inside the block, where the hardware is good at it."""
        with torch.autocast(self.name, dtype=torch.bfloat16, enabled=self.uses_bf16):
            yield


def best_device() -> TorchDevice:
    """Return the GPU if torch finds one, else the CPU."""
    if torch.cuda.is_available():
        return TorchDevice("cuda", torch.cuda.is_bf16_supported())
    return TorchDevice("cpu", bool(torch.cpu.get_capabilities().get("avx512_bf16")))


@dataclass(frozen=True)
class Labelled:
    """Token rows, and the teacher's distributions behind the last ``num_labels`` of each.

    Attributes:
        tokens: (num_rows, length) uint32.
        ids: (num_rows, num_labels, NUM_TOP) uint32. The most probable tokens, best first.
        log_probs: (num_rows, num_labels, NUM_TOP) float32. Theirs, in the full distribution.
    """

    tokens: NDArray[np.uint32]
    ids: NDArray[np.uint32]
    log_probs: NDArray[np.float32]

    def batch(self, rows: NDArray[np.int64], device: TorchDevice) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens (B, length), ids and log-probabilities (B, num_labels, K) of ``rows``."""
        return (
            torch.from_numpy(self.tokens[rows].astype(np.int64)).to(device.name),
            torch.from_numpy(self.ids[rows].astype(np.int64)).to(device.name),
            torch.from_numpy(self.log_probs[rows]).to(device.name),
        )


def num_labels(length: int, vocab_size: int) -> int:
    """Return behind how many tokens of a row distributions can be had at once."""
    return min(length, max(1, _MOST_LOGITS // vocab_size))


class Teacher:
    """A target, its vocabulary and its device.

    Args:
        target: in evaluation mode, on the device.
        vocab_size: of its logits.
        cache_bytes: of keys and values of a token.
        device: where it is.
    """

    def __init__(
        self, target: nn.Module, vocab_size: int, cache_bytes: int, device: TorchDevice
    ) -> None:
        self._target = target
        self.vocab_size = vocab_size
        self._cache_bytes = cache_bytes
        self.device = device

    @torch.inference_mode()
    def label(self, tokens: NDArray[np.int64], num_labels: int) -> Labelled:
        """Return the distributions behind the last tokens of each row, (num_rows, length) int64."""
        at_once = self.device.rows_at_once(num_labels, self.vocab_size)
        parts = [
            self._top(self._logits(row, num_labels))
            for row in torch.split(torch.from_numpy(tokens), at_once)
        ]
        ids, log_probs = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return Labelled(tokens.astype(np.uint32), ids, log_probs)

    @torch.inference_mode()
    def sample(
        self, prompts: NDArray[np.int64], length: int, top_k: int, seed: int
    ) -> tuple[NDArray[np.int64], Labelled]:
        """Sample (temperature 1, top-k) until every row has ``length`` tokens.

        The end-of-sequence token does not stop a row: what follows it is a new text.

        Args:
            prompts: (num_rows, prompt_length) int64.
            length: of the rows, prompts included.
            top_k: to draw from.
            seed: of the draws.

        Returns:
            The rows, (num_rows, length) int64; and the rows without their last token, with the
            distribution behind every token from the last of the prompt on.
        """
        at_once = max(1, _MOST_CACHE_BYTES // (length * self._cache_bytes))
        at_once = min(at_once, max(1, _MOST_LOGITS // self.vocab_size))
        generator = torch.Generator(self.device.name).manual_seed(seed)
        parts = [
            self._sample(rows, length, top_k, generator)
            for rows in torch.split(torch.from_numpy(prompts), at_once)
        ]
        tokens, ids, log_probs = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return tokens, Labelled(tokens[:, :-1].astype(np.uint32), ids, log_probs)

    def _sample(
        self, prompts: Tensor, length: int, top_k: int, generator: torch.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.float32]]:
        name = cache_name(self._target)
        past, pieces, tops = None, [prompts.to(self.device.name)], []
        for _ in range(length - prompts.shape[1]):
            with self.device.autocast():
                out = self._target(
                    input_ids=pieces[-1], use_cache=True, logits_to_keep=1, **{name: past}
                )
            past, logits = getattr(out, name), out.logits.float()
            tops.append(self._top(logits))
            best = logits[:, -1].topk(min(top_k, self.vocab_size))
            drawn = torch.multinomial(best.values.softmax(-1), 1, generator=generator)
            pieces.append(best.indices.gather(-1, drawn))
        ids, log_probs = (np.concatenate(arrays, axis=1) for arrays in zip(*tops, strict=True))
        return torch.cat(pieces, dim=1).cpu().numpy(), ids, log_probs

    def _logits(self, tokens: Tensor, num_labels: int) -> Tensor:
        with self.device.autocast():
            out = self._target(
                input_ids=tokens.to(self.device.name), use_cache=False, logits_to_keep=num_labels
            )
        logits: Tensor = out.logits.float()
        return logits

    def _top(self, logits: Tensor) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """Return ids and log-probabilities of the most probable tokens of (..., vocab) logits."""
        top = logits.topk(min(NUM_TOP, self.vocab_size))
        log_probs = top.values - logits.logsumexp(-1, keepdim=True)
        return top.indices.cpu().numpy().astype(np.uint32), log_probs.cpu().numpy()
