"""Sources of an encoder-decoder, the teacher that answers them, and drafts of its decoder.

A prompt is a source's tokens, then the tokens that every target begins with. A row that a draft
learns from is the source, then the target. Distributions follow tokens of the target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from dsbd_distill.lesson import Lesson, joined
from dsbd_distill.teacher import Opened, Rows, Sampling, Teacher, padded
from dsbd_errors.text_files import opened_text
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.model_config import num_decoder_layers, text_config
from dsbd_export.errors import ExportError
from dsbd_export.texts import TextFile, json_lines
from dsbd_forward.forward import Source
from dsbd_runtime.bundle_files.bundle import SOURCE_TOKENIZER_FILE, TOKENIZER_FILE
from dsbd_runtime.text.tokenizer import Tokenizer


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
        """Separate rows of a pool into sources and targets.

        If targets begin with one token b, a row [s, s, b, y, y] whose last three tokens count has
        the source [s, s] and the target [b, y, y].

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


class RowReader:
    """Reads stored prompts whose requests have a source."""

    answers_a_round = 256  # answers of a round of the pool

    def __init__(self, most_begin: int) -> None:
        """Take the maximum number of tokens before an answer."""
        self.most_begin = most_begin

    def begun(self, prompts: Rows, seed: int) -> list[NDArray[np.integer]]:
        """Return prompts with the tokens that their answers begin with."""
        return [*prompts]

    def request_of(self, row: NDArray[np.integer]) -> tuple[Source, list[int]]:
        """Return the source of a row of ``begun``, as engines read sources, and the prompt."""
        raise NotImplementedError


class SourceRowReader(RowReader):
    """Reads the sources of rows of a pool; here texts, whose targets begin with the same tokens.

    A prompt is a source, followed by the tokens that its target begins with.
    """

    spread = 64  # rows continued together differ in length by less than this

    def __init__(self, target: Any, num_begin: int) -> None:
        """Take the model, and how many tokens of the target follow each stored source."""
        super().__init__(num_begin)
        self._target = target

    def parted(self, row: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of a row of ``begun``, and the tokens that its target begins with."""
        ids = np.asarray(row, np.int64)
        return ids[: -self.most_begin], ids[-self.most_begin :]

    def begins(self, first_labels: Tensor) -> Tensor:
        """Return the index in each row at which its target begins, (B,) int64.

        first_labels: (B,) int64, the first place that counts in each row.
        """
        return first_labels - (self.most_begin - 1)

    def hidden_states(self, sources: Tensor, is_source: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the encoder's output for sources (B, M) as (B, N, W), and its mask (B, N)."""
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
        source, begin = self.parted(row)
        return tuple(source.tolist()), begin.tolist()


@dataclass(frozen=True)
class SourceTeacher(Teacher):
    """A target that reads sources; ``reader`` reads its prompts. See Teacher."""

    reader: SourceRowReader = field(kw_only=True)

    @property
    def spread(self) -> int:
        return self.reader.spread

    def answer(
        self, prompts: Rows, num_new: int, sampling: Sampling, ends: Sequence[int], seed: int
    ) -> Lesson:
        """See Teacher; prompts are sources alone."""
        return super().answer(self.reader.begun(prompts, seed), num_new, sampling, ends, seed)

    def continued(
        self,
        prompts: Rows,
        num_new: int,
        sampling: Sampling,
        generator: torch.Generator,
        ends: Sequence[int],
    ) -> tuple[NDArray[np.int64], Lesson]:
        """See Teacher; rows begin with their sources."""
        rows, lesson = super().continued(prompts, num_new, sampling, generator, ends)
        sources = [self.reader.parted(prompt)[0] for prompt in prompts]
        lessons = [
            dataclasses.replace(
                lesson.at(slice(index, index + 1)),
                tokens=np.concatenate([source, lesson.tokens[index]])[None].astype(np.uint32),
            )
            for index, source in enumerate(sources)
        ]
        whole = [np.concatenate(pair) for pair in zip(sources, rows, strict=True)]
        return padded(whole), joined(lessons)

    def _opened(self, prompts: Rows) -> Opened:
        sources, begins = zip(*map(self.reader.parted, prompts), strict=True)
        ids = torch.from_numpy(padded(sources)).to(self.device.name)
        lengths = torch.tensor([len(source) for source in sources], device=ids.device)
        is_source = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        with self.device.autocast():
            hidden, mask = self.reader.hidden_states(ids, is_source.long())
        outputs = BaseModelOutput(last_hidden_state=hidden)
        arguments = {"encoder_outputs": outputs, "attention_mask": mask}
        return Opened(begins, "decoder_input_ids", arguments)

    def _ruled(self, logits: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        return self.reader.ruled(logits, torch.cat([*pieces], dim=1), pieces[0].shape[1])

    def _rows_at_once(self, length: int) -> int:
        return super()._rows_at_once(self.reader.num_rows(length))


def decoder_parameters(model: PreTrainedModel) -> int:
    """Return the number of parameters in the engine of a model's decoder."""
    is_decoder = text_config(model.config) is model.config and not model.config.is_encoder_decoder
    if is_decoder:
        return int(model.num_parameters())
    parts: list[nn.Module] = [model.get_decoder(), model.get_output_embeddings()]
    return sum(p.numel() for p in {p for part in parts for p in part.parameters()})


def decoder_layers(model: PreTrainedModel) -> int:
    """Return the number of layers of a model, or of an encoder-decoder's decoder."""
    return num_decoder_layers(text_config(model.config))


def sources_of(file: TextFile) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every source of a file; raise ExportError for a line without one."""
    if file.path.suffix == ".jsonl":
        for name, where, content in json_lines(file):
            yield name, _source_in(content, where)
        return
    with file.path.open("rb") as opened, opened_text(opened) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{file.name}:{number}", line.strip()


def _source_in(content: Any, where: str) -> str:
    if isinstance(content, dict):
        if "messages" in content:
            raise ExportError(
                f"{where} is a chat, but the target is an encoder-decoder, which has no chats; "
                'write {"source": "..."}'
            )
        if "source" in content and "text" in content:
            raise ExportError(f"{where} has both a source and a text; write one of them")
        content = content.get("source", content.get("text"))
    if not isinstance(content, str):
        raise ExportError(
            f'{where} has no source; write a string, {{"source": "..."}} or {{"text": "..."}}'
        )
    return content


class SourceTokens:
    """Turns sources into the tokens that the encoder reads, as requests do."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, longest: int) -> None:
        has_own = (folder / SOURCE_TOKENIZER_FILE).is_file()
        self._tokenizer = Tokenizer(
            folder,
            bos_token_id=None if has_own else checkpoint.bos_token_id,
            file=SOURCE_TOKENIZER_FILE if has_own else TOKENIZER_FILE,
        )
        assert checkpoint.encoder is not None  # the caller has checked
        self._encoder = checkpoint.encoder
        self.longest = longest
        self.num_left_out = 0

    def token_ids(self, text: str) -> list[int]:
        """Return the tokens of a source, [] if it is too long."""
        size, unknown = self._encoder.vocab_size, self._encoder.unknown_token_id
        ids = self._tokenizer.encode(text)
        if unknown is not None:
            ids = [token if token < size else unknown for token in ids]
        if len(ids) > self.longest:
            self.num_left_out += 1
            return []
        return ids
