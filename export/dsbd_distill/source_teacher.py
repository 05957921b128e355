"""An encoder-decoder as a teacher: the targets that it makes of sources, and its distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from dsbd_distill.sources import SourceRowReader, padded
from dsbd_distill.teacher import Draws, Labelled, Sampling, Teacher, TorchDevice
from dsbd_export.checkpoints.model_loading import cache_name


class SourceTeacher(Teacher):
    """A target that reads sources; see Teacher. Its prompts are those of ``reader``."""

    def __init__(
        self,
        target: Any,
        vocab_size: int,
        cache_bytes: int,
        device: TorchDevice,
        reader: SourceRowReader,
    ) -> None:
        """Take a target, and what reads its sources."""
        super().__init__(target, vocab_size, cache_bytes, device)
        self._reader = reader
        self.spread = reader.spread

    def answer(
        self,
        prompts: Sequence[NDArray[np.integer]],
        num_new: int,
        sampling: Sampling,
        ends: Sequence[int],
        seed: int,
    ) -> Labelled:
        """See Teacher.answer."""
        begun = self._reader.begun(prompts, seed)
        return super().answer(begun, num_new, sampling, ends, seed)

    def continued(
        self,
        prompts: Sequence[NDArray[np.integer]],
        num_new: int,
        sampling: Sampling,
        generator: torch.Generator,
        ends: Sequence[int],
    ) -> tuple[NDArray[np.int64], Labelled]:
        """See Teacher.continued: all targets begin at the same place, whatever their sources."""
        device, reader = self.device.name, self._reader
        sources, begins = zip(*map(reader.parted, prompts), strict=True)
        with self.device.autocast():
            hidden, is_source = reader.hidden_states(*padded(sources, device))
        past = EncoderDecoderCache(DynamicCache(), DynamicCache())
        name = cache_name(self.target)
        targets = torch.from_numpy(np.stack(begins)).to(device)
        num_begin = num_read = targets.shape[1]
        draws = Draws(self, len(prompts), sampling, generator, ends)
        for _ in range(num_new):
            with self.device.autocast():
                out = self.target(
                    encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
                    attention_mask=is_source,
                    decoder_input_ids=targets[:, -num_read:],
                    use_cache=True,
                    **{name: past},
                )
            past, logits = getattr(out, name), out.logits[:, -1:].float()
            drawn = draws.draw(reader.ruled(logits, targets, num_begin))
            targets, num_read = torch.cat([targets, drawn[:, None]], dim=1), 1
            if draws.are_over:
                break
        return _behind_sources(prompts, targets[:, num_begin:].cpu().numpy(), *draws.labels())

    def _rows_at_once(self, length: int) -> int:
        return super()._rows_at_once(self._reader.num_rows(length))


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
