"""Sources of an encoder-decoder, and the teacher that answers them.

A prompt is a source's tokens, then those that every target begins with. A row that a draft learns
from is the source, then the target; distributions are those after tokens of the target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from dsbd_distill.lesson import Lesson, joined
from dsbd_distill.teacher import Opened, Rows, Sampling, Teacher, TorchDevice, padded
from dsbd_forward.forward import Source


@dataclass(frozen=True)
class SourceRows:
    """Rows separated into source and target."""

    sources: Tensor  # (B, N) int64. Shorter ones end with zeros.
    is_source: Tensor  # (B, N) int64. 1 for the tokens of a source, 0 after them.
    targets: Tensor  # (B, T) int64. Shorter ones end with zeros.
    # (B, T) bool. Whether there is a distribution to learn after a token of the target.
    counted: Tensor

    @classmethod
    def of(cls, tokens: Tensor, counted: Tensor, reader: SourceRowReader) -> SourceRows:
        """Separate rows of a pool.

        If targets begin with one token b, a row [s, s, b, y, y] whose last three count has the
        source [s, s] and the target [b, y, y].

        tokens: (B, length) int64. counted: (B, num_labels) bool, after the last tokens of each row.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        after = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
        after[:, tokens.shape[1] - counted.shape[1] :] = counted
        first = reader.begins(after.int().argmax(1))
        last = tokens.shape[1] - 1 - after.int().flip(1).argmax(1)
        is_source = places < first[:, None]
        sources = (tokens * is_source)[:, : int(first.max())]
        shifted = first[:, None] + torch.arange(int((last - first).max()) + 1, device=tokens.device)
        inside = shifted <= last[:, None]
        shifted = shifted.clamp_max(tokens.shape[1] - 1)
        return cls(
            sources,
            is_source[:, : sources.shape[1]].long(),
            tokens.gather(1, shifted) * inside,
            after.gather(1, shifted) & inside,
        )


class SourceRowReader:
    """Reads the sources of rows of a pool; here texts, whose targets all begin alike."""

    spread = 64  # rows continued together differ in length by less
    answers_a_round = 256  # of the pool; targets are short

    def __init__(self, target: Any, num_begin: int) -> None:
        """Take the model, and how many tokens of the target follow each stored source."""
        self._target = target
        self.most_begin = num_begin

    def begun(self, prompts: Rows, seed: int) -> list[NDArray[np.integer]]:
        """Return prompts, each a source, followed by the tokens that its target begins with."""
        return [*prompts]

    def parted(self, row: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of such a row, and the tokens that its target begins with."""
        ids = np.asarray(row, np.int64)
        return ids[: -self.most_begin], ids[-self.most_begin :]

    def begins(self, first_labels: Tensor) -> Tensor:
        """Return where targets begin in rows, (B,) int64, by the first places that count."""
        return first_labels - (self.most_begin - 1)

    def hidden_states(self, sources: Tensor, is_source: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output for sources, (B, M), as (B, N, W), and its mask, (B, N)."""
        with torch.no_grad():
            output = self._target.get_encoder()(input_ids=sources, attention_mask=is_source)
        return output.last_hidden_state, is_source

    def ruled(self, logits: Tensor, targets: Tensor, num_begin: int) -> Tensor:
        """Return the logits, (B, 1, V), after targets, (B, T) int64, as requests see them."""
        return logits

    def num_rows(self, length: int) -> int:
        """Return how many rows of keys and values a row of the pool needs, cross rows included."""
        return length

    def request_of(self, row: NDArray[np.integer]) -> tuple[Source, list[int]]:
        """Return the source of a row of ``begun`` as engines read it, and the prompt."""
        source, begin = self.parted(row)
        return tuple(source.tolist()), begin.tolist()


class SourceTeacher(Teacher):
    """A target that reads sources; its prompts are those of ``reader``. See Teacher."""

    def __init__(
        self,
        target: Any,
        vocab_size: int,
        cache_bytes: int,
        device: TorchDevice,
        reader: SourceRowReader,
    ) -> None:
        super().__init__(target, vocab_size, cache_bytes, device)
        self._reader = reader
        self.spread = reader.spread

    def answer(
        self, prompts: Rows, num_new: int, sampling: Sampling, ends: Sequence[int], seed: int
    ) -> Lesson:
        """See Teacher; prompts are sources alone."""
        return super().answer(self._reader.begun(prompts, seed), num_new, sampling, ends, seed)

    def continued(
        self,
        prompts: Rows,
        num_new: int,
        sampling: Sampling,
        generator: torch.Generator,
        ends: Sequence[int],
    ) -> tuple[NDArray[np.int64], Lesson]:
        """See Teacher; rows begin with their sources."""
        rows, found = super().continued(prompts, num_new, sampling, generator, ends)
        sources = [self._reader.parted(prompt)[0] for prompt in prompts]
        lessons = [
            dataclasses.replace(
                found.at(slice(index, index + 1)),
                tokens=np.concatenate([source, found.tokens[index]])[None].astype(np.uint32),
            )
            for index, source in enumerate(sources)
        ]
        whole = [np.concatenate(pair) for pair in zip(sources, rows, strict=True)]
        return padded(whole), joined(lessons)

    def _opened(self, prompts: Rows) -> Opened:
        sources, begins = zip(*map(self._reader.parted, prompts), strict=True)
        ids = torch.from_numpy(padded(sources)).to(self.device.name)
        lengths = torch.tensor([len(source) for source in sources], device=ids.device)
        is_source = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        with self.device.autocast():
            hidden, mask = self._reader.hidden_states(ids, is_source.long())
        outputs = BaseModelOutput(last_hidden_state=hidden)
        arguments = {"encoder_outputs": outputs, "attention_mask": mask}
        return Opened(begins, "decoder_input_ids", arguments)

    def _ruled(self, logits: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        return self._reader.ruled(logits, torch.cat([*pieces], dim=1), pieces[0].shape[1])

    def _rows_at_once(self, length: int) -> int:
        return super()._rows_at_once(self._reader.num_rows(length))
