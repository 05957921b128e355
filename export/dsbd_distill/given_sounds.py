"""Sounds in prompts of a language model: the prompts, and their given rows as tokens.

In a stored prompt each given row is a separate token id beyond the vocabulary: in a vocabulary of
300 tokens, 307 is row 7 of all sounds. Target and draft read such a token as that row. Teacher,
pool and loss therefore treat prompts with sounds as any other prompts.

Inputs and rows of the encoder are kept in 16 bits, one file per run of the encoder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsbd_distill.config import FEATURE, DistillConfig
from dsbd_distill.sounds import MOST_KEPT_BYTES, all_heard
from dsbd_distill.sources import RowReader
from dsbd_distill.work_folder import WorkFolder, keep_array, read_array, read_arrays
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.given_prompt.checkpoint import GivenCheckpoint
from dsbd_export.given_prompt.encoders import embedded
from dsbd_export.texts import TextFile, opened_sinks
from dsbd_forward.forward import Source
from dsbd_runtime.media.given_sound import GivenSound
from dsbd_runtime.parts.given.given_prompt import GivenPiece, GivenPrompt
from dsbd_runtime.parts.given.given_rows import GivenEntry

AskedOf = Callable[[Path], Iterator[Any]]
"""Yields the prompts of an audio file: lists of tokens with a ``source``; raises InputError."""
Ask = Callable[[GivenEntry, int, Path, str | None, str | None], AskedOf]
"""Takes a model's entry, its context length, a folder with tokenizer and chat template, language
and task."""


def read_by_draft(config: DistillConfig, target: Checkpoint) -> Checkpoint:
    """Return the target as its draft reads it: only the text part, unless the draft reads sound."""
    if not isinstance(target, GivenCheckpoint):
        return target
    hears = config.params is None or config.kind == FEATURE
    if hears and isinstance(target.given.medium, GivenSound):
        return target
    return Checkpoint(**{each.name: getattr(target, each.name) for each in fields(Checkpoint)})


def reads_sound(target: Checkpoint) -> bool:
    """Return whether a draft of a target learns from audio."""
    encoder = target.encoder
    return isinstance(target, GivenCheckpoint) or bool(encoder and encoder.speech)


def write_prompts(
    files: Iterable[TextFile], asked_of: AskedOf, target: GivenCheckpoint, work: WorkFolder
) -> None:
    """Write the encoder's inputs, then all prompts; raise ExportError for non-audio files."""
    shutil.rmtree(work.pieces, ignore_errors=True)
    work.pieces.mkdir()
    num_rows = 0
    with opened_sinks(work.tokens) as sink_of:
        for file, prompt in all_heard(files, asked_of):
            ids = np.array(prompt)
            is_given = ids == target.given.placeholder_token_id
            ids[is_given] = target.vocab_size + num_rows + np.arange(is_given.sum())
            for piece in prompt.inputs.source.pieces:
                inputs = {
                    name: values.astype(np.float16) if values.dtype == np.float32 else values
                    for name, values in piece.inputs.items()
                }
                inputs["num_rows"] = np.array(piece.num_rows)
                np.savez(work.pieces / f"{num_rows:012d}", allow_pickle=False, **inputs)
                num_rows += piece.num_rows
            sink_of(file.name).write_prompt(ids.tolist())


class GivenSounds(RowReader):
    """The sounds in prompts that ``write_prompts`` has written, and their given rows."""

    answers_a_round = 64  # long prompts are slow

    def __init__(
        self, target: Any, checkpoint: GivenCheckpoint, work: WorkFolder, most_begin: int
    ) -> None:
        """Let the target read prompts; ``most_begin``: tokens of the longest one."""
        super().__init__(most_begin)
        self._num_tokens, self._given = checkpoint.vocab_size, checkpoint.given
        self._encoder = checkpoint.kind.encoder(target)
        self._read_as = checkpoint.kind.read_as
        self._pieces, self._kept = work.pieces, work.hidden_states
        self._kept.mkdir(exist_ok=True)
        self._firsts = np.array(sorted(int(file.stem) for file in self._pieces.iterdir()))
        self.read_by(target)

    def read_by(self, model: Any) -> None:
        """Let a model read tokens beyond the vocabulary as the rows that they stand for."""

        def read(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
            given["inputs_embeds"] = self._embedded(model, given.pop("input_ids"))
            return args, given

        model.register_forward_pre_hook(read, with_kwargs=True)

    def request_of(self, row: NDArray[np.integer]) -> tuple[Source, list[int]]:
        """See RowReader."""
        ids = np.array(row, np.int64)
        is_given = ids >= self._num_tokens
        firsts = np.unique(self._firsts_of(ids[is_given] - self._num_tokens))
        ids[is_given] = self._given.placeholder_token_id
        pieces = [self._piece(first) for first in firsts.tolist()]
        return GivenPrompt(is_given.nonzero()[0], pieces), ids.tolist()

    def _embedded(self, model: Any, ids: Tensor) -> Tensor:
        """Return the embeddings, (B, n, W), of tokens and given rows, (B, n)."""
        is_given, placeholder = ids >= self._num_tokens, self._given.placeholder_token_id
        tokens = ids.masked_fill(is_given, placeholder)
        embeddings = embedded(model, tokens, placeholder, self._read_as)
        if is_given.any():
            rows = self.rows((ids[is_given] - self._num_tokens).cpu().numpy())
            embeddings = embeddings.index_put((is_given,), torch.from_numpy(rows).to(embeddings))
        return embeddings

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return given rows by their numbers, (n,): (n, W)."""
        rows = np.empty((len(numbers), self._given.width), np.float32)
        firsts = self._firsts_of(numbers)
        for first in np.unique(firsts).tolist():
            is_of_piece = firsts == first
            rows[is_of_piece] = self._rows_from(first)[numbers[is_of_piece] - first]
        return rows

    def _firsts_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        firsts: NDArray[np.int64] = self._firsts[self._firsts.searchsorted(numbers, "right") - 1]
        return firsts

    def _piece(self, first: int) -> GivenPiece:
        names = [*self._given.medium.encoder_inputs]
        num_rows, *arrays = read_arrays(self._pieces / f"{first:012d}.npz", ["num_rows", *names])
        inputs = {
            name: array.astype(np.float32) if array.dtype == np.float16 else array
            for name, array in zip(names, arrays, strict=True)
        }
        return GivenPiece(inputs, int(num_rows))

    @torch.no_grad()
    def _rows_from(self, first: int) -> NDArray[np.float16]:
        """Return the rows of the piece whose first row has number ``first``, (E, W)."""
        file = self._kept / f"{first:012d}.npy"
        if file.exists():
            return read_array(file)
        inputs, device = self._piece(first).inputs, next(self._encoder.parameters()).device
        names = self._given.medium.encoder_inputs
        tensors = [torch.tensor(inputs[name], device=device) for name in names]
        with torch.autocast(
            device.type, enabled=False
        ):  # the kept rows serve exact measurements too
            rows = self._encoder(tensors)[0].cpu().numpy().astype(np.float16)
        if first * rows[0].nbytes < MOST_KEPT_BYTES:
            keep_array(file, rows)
        return rows  # type: ignore[no-any-return]  # the module has no types
