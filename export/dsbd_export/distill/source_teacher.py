"""An encoder-decoder as a teacher: the targets that it makes of sources, and its distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from dsbd_export.distill.sources import padded
from dsbd_export.distill.teacher import Labelled, Sampling, Teacher, TorchDevice
from dsbd_export.model_loading import cache_name


class SourceTeacher(Teacher):
    """A target that reads sources; see Teacher. Its prompts are those of ``sources``."""

    def __init__(
        self, target: Any, vocab_size: int, cache_bytes: int, device: TorchDevice, num_begin: int
    ) -> None:
        """Take a target.

        num_begin: tokens that a target begins with, at the end of every prompt.
        """
        super().__init__(target, vocab_size, cache_bytes, device)
        self._num_begin = num_begin

    def continued(
        self,
        prompts: Sequence[NDArray[np.integer]],
        num_new: int,
        sampling: Sampling,
        generator: torch.Generator,
        ends: Sequence[int],
    ) -> tuple[NDArray[np.int64], Labelled]:
        """See Teacher.continued: all targets begin at the same place, whatever their sources."""
        device = self.device.name
        sources = [np.asarray(prompt[: -self._num_begin], np.int64) for prompt in prompts]
        begins = np.stack([prompt[-self._num_begin :] for prompt in prompts]).astype(np.int64)
        source_ids, is_source = padded(sources, device)
        with self.device.autocast():
            hidden = hidden_states(self.target, source_ids, is_source)
        past = EncoderDecoderCache(DynamicCache(), DynamicCache())
        name, token_ids = cache_name(self.target), torch.from_numpy(begins).to(device)
        is_over = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        end_ids = torch.tensor([*ends], dtype=torch.int64, device=device)
        tops, counted, drawn = [], [], []
        for _ in range(num_new):
            with self.device.autocast():
                out = self.target(
                    encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
                    attention_mask=is_source,
                    decoder_input_ids=token_ids,
                    use_cache=True,
                    **{name: past},
                )
            past, logits = getattr(out, name), out.logits[:, -1:].float()
            tops.append(self.top(logits))
            counted.append(~is_over)
            best = logits[:, -1].topk(min(sampling.top_k, self.vocab_size))
            picked = torch.multinomial(sampling.probs(best.values), 1, generator=generator)
            token_ids = best.indices.gather(-1, picked)
            drawn.append(token_ids)
            is_over = is_over | torch.isin(token_ids[:, 0], end_ids)
            if is_over.all():
                break
        ids, log_probs = (np.concatenate(arrays, axis=1) for arrays in zip(*tops, strict=True))
        new = torch.cat(drawn, dim=1).cpu().numpy()
        learned = torch.stack(counted, dim=1).cpu().numpy()
        return _behind_sources(prompts, new, ids, log_probs, learned)


def _behind_sources(
    prompts: Sequence[NDArray[np.integer]],
    new: NDArray[np.int64],
    ids: NDArray[np.uint32],
    log_probs: NDArray[np.float32],
    counted: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], Labelled]:
    """Return rows of a prompt and what was drawn, and all but their last token with distributions.

    new: (B, T) tokens. ids, log_probs: (B, T, K). counted: (B, T). What is behind the end of a
    target does not count.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    num_new, first = new.shape[1], int(lengths.min()) - 1  # of the places with labels
    rows = np.zeros((len(prompts), int(lengths.max()) + num_new), np.int64)
    shape = len(prompts), rows.shape[1] - 1 - first
    all_ids = np.zeros((*shape, ids.shape[-1]), np.uint32)
    all_log_probs = np.zeros((*shape, ids.shape[-1]), np.float32)
    learned = np.zeros(shape, np.bool_)
    for index, (prompt, length) in enumerate(zip(prompts, lengths.tolist(), strict=True)):
        rows[index, :length] = prompt
        rows[index, length : length + num_new] = new[index]
        labels = slice(length - 1 - first, length - 1 - first + num_new)
        all_ids[index, labels], all_log_probs[index, labels] = ids[index], log_probs[index]
        learned[index, labels] = counted[index]
    tokens = rows[:, :-1].astype(np.uint32)
    return rows, Labelled(tokens, all_ids, all_log_probs, learned)


def hidden_states(model: Any, source_ids: Tensor, is_source: Tensor) -> Tensor:
    """Return what the encoder of a model leaves of sources, (B, N, W), without gradients.

    source_ids, is_source: (B, N) int64, see ``SourceRows``.
    """
    with torch.no_grad():
        output = model.get_encoder()(input_ids=source_ids, attention_mask=is_source)
    hidden: Tensor = output.last_hidden_state
    return hidden
