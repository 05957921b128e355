"""Lessons: token rows with the target's distributions after some of their tokens.

A distribution has the ``NUM_TOP`` most probable tokens; one bucket stands for all others. A row for
an encoder-decoder is its source followed by its target; see ``sources``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsbd_distill.work_folder import keep_array, read_array, read_arrays
from dsbd_runtime.bundle_files.durable_files import put_in_place

NUM_TOP = 32
BYTES_PER_FEATURE = 2  # bytes of one number
FeatureRows = tuple[NDArray[np.int16], ...]
"""Features by row, (num_tokens, width) each: the bits of bf16, which numpy lacks."""


@dataclass(frozen=True)
class Lesson:
    """Token rows, and the target's distributions after the last ``num_labels`` tokens of each."""

    tokens: NDArray[np.uint32]  # (num_rows, length) uint32. Shorter rows end with zeros.
    # (num_rows, num_labels, NUM_TOP) uint32. The most probable tokens, best first.
    ids: NDArray[np.uint32]
    # (num_rows, num_labels, NUM_TOP) float. Log-probabilities of ``ids`` over the full vocabulary.
    log_probs: NDArray[np.floating]
    # (num_rows, num_labels) bool. False inside a prompt and after the end of an answer.
    counted: NDArray[np.bool_]
    # (n, width) for each row, if the draft reads features: of the row's tokens before the last one
    # that counts
    features: FeatureRows | None = None

    def batch(self, rows: NDArray[np.int64], device: str) -> tuple[Tensor, ...]:
        """Return tokens, ids, log_probs, counted, and features if there are any, of ``rows``."""
        used = np.flatnonzero(self.counted[rows].any(0))
        labels = slice(used[0], used[-1] + 1)
        length = self.tokens.shape[1] - self.counted.shape[1] + labels.stop
        arrays = (
            self.tokens[rows, :length].astype(np.int64),
            self.ids[rows, labels].astype(np.int64),
            self.log_probs[rows, labels].astype(np.float32),
            self.counted[rows, labels],
        )
        tensors = tuple(torch.from_numpy(array).to(device) for array in arrays)
        if self.features is None:
            return tensors
        chosen = [self.features[row] for row in rows]
        return (*tensors, _unpacked(chosen, length - 1, device))

    def at(self, rows: slice | NDArray[np.int64]) -> Lesson:
        features = self.features
        if features is not None:
            features = tuple(features[row] for row in np.arange(len(self.tokens))[rows])
        return Lesson(
            self.tokens[rows], self.ids[rows], self.log_probs[rows], self.counted[rows], features
        )

    def within(self, length: int, num_labels: int) -> Lesson:
        """Return the rows padded to ``length`` tokens, with ``num_labels`` labels each."""
        after = length - self.tokens.shape[1]
        labels = ((0, 0), (num_labels - after - self.counted.shape[1], after))
        return Lesson(
            np.pad(self.tokens, ((0, 0), (0, after))),
            np.pad(self.ids, (*labels, (0, 0))),
            np.pad(self.log_probs, (*labels, (0, 0))),
            np.pad(self.counted, labels),
            self.features,
        )

    def with_features(self, parts: Sequence[Tensor]) -> Lesson:
        """Return the rows with features of all tokens; a part is (num_rows, n, width) bf16."""
        bits = torch.cat([*parts], dim=1).view(torch.int16).cpu().numpy()
        lengths = self._feature_lengths().tolist()
        rows = (row[:length] for row, length in zip(bits, lengths, strict=True))
        return dataclasses.replace(self, features=tuple(rows))

    def _feature_lengths(self) -> NDArray[np.int64]:
        """Return how many features each row has: one for each token before the last that counts."""
        lengths: NDArray[np.int64] = self.tokens.shape[1] - self.counted[:, ::-1].argmax(1) - 1
        return lengths

    def write(self, file: Path) -> None:
        """Write features, if any, to an .npy file, then the rest to an .npz file.

        Each file appears only when it is complete.
        """
        partial = file.with_suffix(".partial")
        if self.features is not None:
            keep_array(_features_file(file), np.concatenate(self.features))
        with partial.open("wb") as opened:
            np.savez(
                opened,
                allow_pickle=False,
                tokens=self.tokens,
                counted=self.counted,
                ids=self.ids[self.counted],
                log_probs=self.log_probs[self.counted],
            )
        put_in_place(partial, file)

    @classmethod
    def read(cls, file: Path, *, with_features: bool = False) -> Lesson:
        """Read what ``write`` wrote, features memory-mapped; ExportError for a damaged file."""
        names = ("tokens", "counted", "ids", "log_probs")
        tokens, counted, ids, log_probs = read_arrays(file, names)
        shape = (*counted.shape, ids.shape[-1])
        rows = Lesson(tokens, np.zeros(shape, np.uint32), np.zeros(shape, np.float32), counted)
        rows.ids[counted], rows.log_probs[counted] = ids, log_probs
        if not with_features:
            return rows
        ends = np.cumsum(rows._feature_lengths())
        features = np.split(read_array(_features_file(file)), ends[:-1])
        return dataclasses.replace(rows, features=tuple(features))

    @staticmethod
    def is_stored(file: Path, *, with_features: bool) -> bool:
        return file.exists() and (not with_features or _features_file(file).exists())


def joined(parts: Sequence[Lesson]) -> Lesson:
    """Return the rows of all parts, one after the other, padded to the same size."""
    length = max(part.tokens.shape[1] for part in parts)
    begins = [part.tokens.shape[1] - part.counted.shape[1] for part in parts]
    wide = [part.within(length, length - min(begins)) for part in parts]
    arrays = ((part.tokens, part.ids, part.log_probs, part.counted) for part in wide)
    rows = [row for part in parts for row in part.features or ()]
    features = None if parts[0].features is None else tuple(rows)
    tokens, ids, log_probs, counted = map(np.concatenate, zip(*arrays, strict=True))
    return Lesson(tokens, ids, log_probs, counted, features)


def _features_file(file: Path) -> Path:
    return file.with_suffix(".npy")


def _unpacked(rows: Sequence[NDArray[np.int16]], num_tokens: int, device: str) -> Tensor:
    """Return rows of features, (n, width) bits of bf16 each, as (B, num_tokens, width) float32."""
    bits = np.zeros((len(rows), num_tokens, rows[0].shape[1]), np.int16)
    for index, row in enumerate(rows):
        bits[index, : len(row)] = row[:num_tokens]
    return torch.from_numpy(bits).view(torch.bfloat16).to(device).float()
