"""Sources that a draft of an encoder-decoder learns from: lines of texts, and their tokens on disk.

What rows of a pool say of their sources is the seam ``SourceRowReader``: of texts here, of windows
of sound in ``sounds``.

A source is a line of a file, of a ``.jsonl`` file a string, or an object with a field ``source`` or
``text``. What it is to become is not read: the target says it itself, and the draft learns that.

A source is kept as a prompt: its tokens, and those that every target begins with (the start token,
and the first one where the model forces it). So a row that is learned from is the source and the
target one behind the other, and the places behind tokens of the target count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.json_files import json_object
from dsbd_export.errors import ExportError
from dsbd_export.texts import TextFile, opened_sinks
from dsbd_forward.forward import Source
from dsbd_runtime.bundle_files.bundle import (
    GENERATION_CONFIG_FILE,
    SOURCE_TOKENIZER_FILE,
    TOKENIZER_FILE,
)
from dsbd_runtime.text.tokenizer import Tokenizer

MOST_SOURCE = 512  # tokens of a source, where the encoder reads as many


def target_begin(checkpoint: Checkpoint) -> list[int]:
    """Return the tokens that every target of an encoder-decoder begins with.

    Raises:
        ExportError: it is a language, which requests choose and the checkpoint does not.
    """
    encoder = checkpoint.encoder
    assert encoder is not None  # the caller has asked
    file, name = checkpoint.folder / GENERATION_CONFIG_FILE, "forced_bos_token_id"
    content = json_object(file) if file.is_file() else {}
    forced = content.get(name, getattr(checkpoint.config, name, None))
    if forced is not None:
        return [encoder.start_token_id, int(forced)]
    if encoder.languages is not None:
        raise ExportError(
            f"the target at {checkpoint.folder} (family {checkpoint.family}) translates between "
            f"{len(encoder.languages)} languages, and its generation_config.json has no {name}: a "
            "draft is trained for one language of targets; write its token there"
        )
    return [encoder.start_token_id]


def sources_of(file: TextFile) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every source of a file; empty lines are none.

    Raises:
        ExportError: a line of a .jsonl file holds no source.
    """
    is_json = file.path.suffix == ".jsonl"
    with file.path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                text = _source_of_line(line, f"{file.path}:{number}") if is_json else line.strip()
                yield f"{file.name}:{number}", text


def _source_of_line(line: str, where: str) -> str:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{where} is invalid JSON ({error}); write one object a line") from error
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
    """Turns sources into the tokens that the encoder reads, as requests do.

    Attributes:
        num_left_out: sources that were longer than ``longest``.
    """

    def __init__(self, folder: Path, checkpoint: Checkpoint, longest: int) -> None:
        """Take the folder of the tokenizer, and how many tokens a source may have."""
        has_own = (folder / SOURCE_TOKENIZER_FILE).is_file()
        self._tokenizer = Tokenizer(
            folder,
            bos_token_id=None if has_own else checkpoint.bos_token_id,
            file=SOURCE_TOKENIZER_FILE if has_own else TOKENIZER_FILE,
        )
        assert checkpoint.encoder is not None  # the caller has asked
        self._encoder = checkpoint.encoder
        self.longest = longest
        self.num_left_out = 0

    def token_ids(self, text: str) -> list[int]:
        """Return the tokens of a source; none of one that is too long."""
        size, unknown = self._encoder.vocab_size, self._encoder.unknown_token_id
        ids = self._tokenizer.encode(text)
        if unknown is not None:
            ids = [token if token < size else unknown for token in ids]
        if len(ids) > self.longest:
            self.num_left_out += 1
            return []
        return ids


def write_sources(
    files: Iterable[TextFile], reader: SourceTokens, begin: list[int], folder: Path
) -> None:
    """Write the tokens of all sources to ``folder``, which appears when it is complete.

    begin: the tokens that every target begins with, which are put behind each.
    """
    with opened_sinks(folder) as sink_of:
        for file in files:
            for name, text in sources_of(file):
                if ids := reader.token_ids(text):
                    sink_of(name).write_prompt([*ids, *begin])


@dataclass(frozen=True)
class SourceRows:
    """Rows of source and target, parted.

    Attributes:
        sources: (B, N) int64. Shorter ones end with zeros.
        is_source: (B, N) int64. 1 for the tokens of a source, 0 behind them.
        targets: (B, T) int64. Likewise.
        counted: (B, T) bool. Behind which tokens of the targets there is something to learn.
    """

    sources: Tensor
    is_source: Tensor
    targets: Tensor
    counted: Tensor

    @classmethod
    def of(cls, tokens: Tensor, counted: Tensor, reader: SourceRowReader) -> SourceRows:
        """Part rows of a pool.

        A row [s, s, b, y, y] whose last three count has, with one token b that a target begins
        with, the source [s, s] and the target [b, y, y].

        Args:
            tokens: (B, length) int64.
            counted: (B, num_labels) bool, behind the last tokens of each row.
            reader: knows where the targets begin.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        behind = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
        behind[:, tokens.shape[1] - counted.shape[1] :] = counted
        first = reader.begins(behind.int().argmax(1))
        last = tokens.shape[1] - 1 - behind.int().flip(1).argmax(1)
        is_source = places < first[:, None]
        sources = (tokens * is_source)[:, : int(first.max())]
        shifted = first[:, None] + torch.arange(int((last - first).max()) + 1, device=tokens.device)
        inside = shifted <= last[:, None]
        shifted = shifted.clamp_max(tokens.shape[1] - 1)
        return cls(
            sources,
            is_source[:, : sources.shape[1]].long(),
            tokens.gather(1, shifted) * inside,
            behind.gather(1, shifted) & inside,
        )


class SourceRowReader(Protocol):
    """What rows of a pool say of their sources.

    Attributes:
        most_begin: tokens that a target begins with, at most.
        spread: tokens by which rows that are continued together differ, less one at most.
        answers_a_round: sources of a round of the pool.
    """

    most_begin: int
    spread: int
    answers_a_round: int

    def begun(self, prompts: Sequence[NDArray[np.integer]], seed: int) -> list[NDArray[np.integer]]:
        """Return prompts, each a source, with what its target begins with behind it.

        seed: of what is drawn for that.
        """

    def parted(self, row: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of such a row and what its target begins with."""

    def begins(self, first_labels: Tensor) -> Tensor:
        """Return where the targets begin in rows, (B,) int64.

        first_labels: (B,) int64. The first place of each that counts.
        """

    def hidden_states(self, sources: Tensor, is_source: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what the encoder leaves of sources, (B, N, W), and which of it counts, (B, N).

        Without gradients. sources, is_source: (B, M) int64, see ``SourceRows``.
        """

    def ruled(self, logits: Tensor, targets: Tensor, num_begin: int) -> Tensor:
        """Return the logits behind targets as requests see them, (B, 1, V).

        targets: (B, T) int64. With the ``num_begin`` tokens that they begin with.
        """

    def num_rows(self, length: int) -> int:
        """Return how many rows of keys and values a row of the pool takes, its own and cross."""

    def request_of(self, row: NDArray[np.integer]) -> tuple[Source, list[int]]:
        """Return the source of a row of ``begun`` as engines read it, and the prompt."""


class TextSources:
    """Sources that are tokens; see SourceRowReader. Targets all begin with the same."""

    spread = 64
    answers_a_round = 256  # targets are short

    def __init__(self, target: Any, num_begin: int) -> None:
        """Take the model, and how many tokens of a target stand behind every source already."""
        self._target = target
        self.most_begin = num_begin

    def begun(self, prompts: Sequence[NDArray[np.integer]], seed: int) -> list[NDArray[np.integer]]:
        """See SourceRowReader."""
        return [*prompts]

    def parted(self, row: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See SourceRowReader."""
        ids = np.asarray(row, np.int64)
        return ids[: -self.most_begin], ids[-self.most_begin :]

    def begins(self, first_labels: Tensor) -> Tensor:
        """See SourceRowReader."""
        return first_labels - (self.most_begin - 1)

    def hidden_states(self, sources: Tensor, is_source: Tensor) -> tuple[Tensor, Tensor | None]:
        """See SourceRowReader."""
        with torch.no_grad():
            output = self._target.get_encoder()(input_ids=sources, attention_mask=is_source)
        return output.last_hidden_state, is_source

    def ruled(self, logits: Tensor, targets: Tensor, num_begin: int) -> Tensor:
        """See SourceRowReader."""
        return logits

    def num_rows(self, length: int) -> int:
        """See SourceRowReader."""
        return length

    def request_of(self, row: NDArray[np.integer]) -> tuple[Source, list[int]]:
        """See SourceRowReader."""
        source, begin = self.parted(row)
        return tuple(source.tolist()), begin.tolist()


def padded(rows: Sequence[NDArray[np.integer]], device: str) -> tuple[Tensor, Tensor]:
    """Return rows in one array, (B, N) int64, and which of its numbers are theirs, likewise."""
    longest = max(map(len, rows))
    ids = np.zeros((len(rows), longest), np.int64)
    is_own = np.zeros((len(rows), longest), np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
        is_own[index, : len(row)] = 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(is_own).to(device)
