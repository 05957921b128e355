"""Sounds that an encoder reads into a prompt: whole, in chunk windows or in Whisper's windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.given.given_medium import CTC_LOGITS, MediumEntry
from dsbd_runtime.parts.given.given_prompt import GivenPiece
from dsbd_runtime.parts.part import BOOL, FLOAT32, INT64, Tensors, TensorSpec
from dsbd_runtime.parts.source.encoder_entry import INPUT_FEATURES
from dsbd_runtime.parts.source.speech_entry import LARGEST_SOUND
from dsbd_runtime.typed_json import check_counts, mismatch

IS_FRAME, KEPT_ROWS, WINDOW_PAIRS = "is_frame", "kept_rows", "window_pairs"
_MOST_FRAMES = LARGEST_SOUND["num_frames"]
_LONGEST_PADDING = 300 * LARGEST_SOUND["sampling_rate"]  # samples
_NUM_HALVINGS = 3  # convolutions of stride 2, which halve the frames of a chunk
_NUM_CODES = 256  # codes of Latin-1, the first characters that a CTC output can spell
_MOST_CHARACTERS = 2**17


@dataclass(frozen=True, kw_only=True)
class GivenSound:
    """Sound as log-mel frames: base of the kinds.

    Attributes:
        recipe: name of the recipe for prompts that transcribe it.
        num_mels: number of mels, M.
        n_fft: samples of a frame.
        hop_length: samples from one frame to the next.
    """

    recipe: str
    sampling_rate: int
    num_mels: int
    n_fft: int
    hop_length: int

    def check(self, where: str) -> None:
        """See MediumEntry."""
        for name in ("sampling_rate", "num_mels", "n_fft", "hop_length"):
            check_counts({name: getattr(self, name)}, where, LARGEST_SOUND[name])

    def num_rows(self, num_frames: int) -> int:
        """Return the number of rows of a sound with ``num_frames`` frames."""
        raise NotImplementedError

    def check_features(self, features: NDArray[np.float32], least: int) -> None:
        """Raise InputError unless features are (num_mels, frames) with ``least`` frames or more."""
        shape = features.shape
        if len(shape) != 2 or shape[0] != self.num_mels or shape[1] < least:
            raise InputError(
                f"the features of a sound have shape {shape}, expected ({self.num_mels}, number "
                f"of frames), at least {least} frames"
            )


@dataclass(frozen=True, kw_only=True)
class ChunkedSound(GivenSound, MediumEntry):
    """Sound in chunks that are convolved separately, and windows that attend only to themselves.

    | input of the encoder | shape, type | meaning |
    |---|---|---|
    | input_features | [T,M,F] float32 | T chunks of F frames of M mels; zeros at the end |
    | kept_rows | [E] int64 | the rows without padding, counted over the T chunks |

    Attributes:
        chunk_frames: frames of a chunk, F. 100 frames become 50, 25, 13 rows.
        window_frames: most frames of a window, a multiple of ``chunk_frames``.
        least_samples: shorter sounds are padded with zeros to this length.
    """

    kind: str = "chunked-sound"
    recipe: str = "qwen3_asr"
    chunk_frames: int
    window_frames: int
    least_samples: int

    @property
    def encoder_inputs(self) -> Tensors:
        shape = "T", self.num_mels, self.chunk_frames
        return {INPUT_FEATURES: TensorSpec(FLOAT32, shape), KEPT_ROWS: TensorSpec(INT64, ("E",))}

    def check(self, where: str) -> None:
        super().check(where)
        sizes = {"chunk_frames": self.chunk_frames, "window_frames": self.window_frames}
        check_counts(sizes, where, _MOST_FRAMES)
        check_counts({"least_samples": self.least_samples}, where, _LONGEST_PADDING)
        if self.window_frames % self.chunk_frames:
            expected = f"a multiple of chunk_frames, {self.chunk_frames}"
            raise mismatch(expected, self.window_frames, f"{where}: window_frames")

    def num_rows(self, num_frames: int) -> int:
        whole, rest = divmod(num_frames, self.chunk_frames)
        return whole * _halved(self.chunk_frames) + _halved(rest)

    def pieces(self, features: NDArray[np.float32]) -> list[GivenPiece]:
        """See MediumEntry: the windows of a sound; features: (num_mels, num_frames), unpadded."""
        self.check_features(features, 1)
        pieces = []
        for start in range(0, features.shape[1], self.window_frames):
            window = features[:, start : start + self.window_frames]
            padded = np.pad(window, ((0, 0), (0, -window.shape[1] % self.chunk_frames)))
            chunks = padded.reshape(self.num_mels, -1, self.chunk_frames).transpose(1, 0, 2)
            num_rows = self.num_rows(window.shape[1])
            inputs: dict[str, NDArray[Any]]
            inputs = {INPUT_FEATURES: chunks, KEPT_ROWS: np.arange(num_rows)}
            pieces.append(GivenPiece(inputs, num_rows))
        return pieces


def _halved(num_frames: int) -> int:
    """Return the number of rows for the frames of one chunk."""
    for _ in range(_NUM_HALVINGS):
        num_frames = -(-num_frames // 2)
    return num_frames


@dataclass(frozen=True, kw_only=True)
class StackedSound(GivenSound, MediumEntry):
    """Sound as pairs of log-mel frames: a conformer reads the whole, a Q-Former each window.

    | tensor of the encoder | shape, type | meaning |
    |---|---|---|
    | input_features | [B,P,2M] float32 | B blocks of P pairs of frames; zeros at the end |
    | is_frame | [B,P] bool | the pairs without padding |
    | window_pairs | [Q,N] int64 | the pairs of each window, BP after the last one |
    | ctc_logits | [T,C] float32 | output, if C > 0: character logits of each of the T = BP pairs |

    Attributes:
        window_length: samples of the window in the middle of a frame.
        block_pairs: P, pairs of a block, which attend to each other.
        window_pairs: N, pairs of a window, which become ``window_rows`` rows.
        num_characters: C. Label 0 is no character, 1 to 255 are Latin-1, others have no code here.
    """

    kind: str = "stacked-sound"
    window_length: int
    block_pairs: int
    window_pairs: int
    window_rows: int
    num_characters: int = 0

    @property
    def encoder_inputs(self) -> Tensors:
        return {
            INPUT_FEATURES: TensorSpec(FLOAT32, ("B", self.block_pairs, 2 * self.num_mels)),
            IS_FRAME: TensorSpec(BOOL, ("B", self.block_pairs)),
            WINDOW_PAIRS: TensorSpec(INT64, ("Q", self.window_pairs)),
        }

    @property
    def encoder_outputs(self) -> Tensors:
        if not self.num_characters:
            return {}
        return {CTC_LOGITS: TensorSpec(FLOAT32, (None, self.num_characters))}

    def check(self, where: str) -> None:
        super().check(where)
        check_counts({"window_length": self.window_length}, where, self.n_fft)
        sizes = {"block_pairs": self.block_pairs, "window_pairs": self.window_pairs}
        check_counts(sizes, where, _MOST_FRAMES)
        check_counts({"window_rows": self.window_rows}, where, self.window_pairs)
        if not 0 <= self.num_characters <= _MOST_CHARACTERS:
            expected = f"0 to {_MOST_CHARACTERS}"
            raise mismatch(expected, self.num_characters, f"{where}: num_characters")

    def num_rows(self, num_frames: int) -> int:
        """Return the number of rows for ``num_frames`` frames; an odd last frame is dropped."""
        return -(-(num_frames // 2) // self.window_pairs) * self.window_rows

    def pieces(self, features: NDArray[np.float32]) -> list[GivenPiece]:
        """See MediumEntry: one piece; features: (num_mels, num_frames), at least two frames."""
        self.check_features(features, 2)
        num_pairs = features.shape[1] // 2
        num_padded = -(-num_pairs // self.block_pairs) * self.block_pairs
        padded = np.zeros((num_padded, 2 * self.num_mels), np.float32)
        padded[:num_pairs] = features[:, : 2 * num_pairs].T.reshape(num_pairs, -1)
        num_windows = -(-num_pairs // self.window_pairs)
        pairs = np.arange(num_windows * self.window_pairs)
        inputs = {
            INPUT_FEATURES: padded.reshape(-1, self.block_pairs, 2 * self.num_mels),
            IS_FRAME: (np.arange(num_padded) < num_pairs).reshape(-1, self.block_pairs),
            WINDOW_PAIRS: np.where(pairs < num_pairs, pairs, num_padded).reshape(num_windows, -1),
        }
        return [GivenPiece(inputs, num_windows * self.window_rows)]

    def spelled(self, labels: NDArray[np.int64]) -> str:
        """See MediumEntry; label 0 is no character."""
        heard = labels[np.diff(labels, prepend=-1) != 0]  # a character may last for several pairs
        return "".join(map(chr, heard[(heard > 0) & (heard < _NUM_CODES)].tolist()))


@dataclass(frozen=True, kw_only=True)
class WindowedSound(GivenSound, MediumEntry):
    """Sound as log-mel features of windows of one length; the last is padded with silence.

    | input of the encoder | shape, type | meaning |
    |---|---|---|
    | input_features | [M,F] float32 | the F frames of a window |
    | kept_rows | [E] int64 | the rows without padding |
    | is_frame | [F] bool | if ``hides_padding``: the frames without padding |

    Attributes:
        num_frames: frames of a window, F.
        merged: number of encoder positions, of two frames each, that become one row.
        hides_padding: whether the encoder's attention excludes padding.
        most_windows: maximum number of windows of a sound.
    """

    kind: str = "windowed-sound"
    num_frames: int
    merged: int
    hides_padding: bool
    most_windows: int

    @property
    def encoder_inputs(self) -> Tensors:
        inputs = {
            INPUT_FEATURES: TensorSpec(FLOAT32, (self.num_mels, self.num_frames)),
            KEPT_ROWS: TensorSpec(INT64, ("E",)),
        }
        if self.hides_padding:
            inputs[IS_FRAME] = TensorSpec(BOOL, (self.num_frames,))
        return inputs

    @property
    def window_samples(self) -> int:
        return self.num_frames * self.hop_length

    def check(self, where: str) -> None:
        super().check(where)
        check_counts({"num_frames": self.num_frames}, where, _MOST_FRAMES)
        check_counts({"merged": self.merged, "most_windows": self.most_windows}, where)
        if self.num_frames % (2 * self.merged):
            expected = f"a multiple of {2 * self.merged}, the frames of a row"
            raise mismatch(expected, self.num_frames, f"{where}: num_frames")

    def num_rows(self, num_frames: int) -> int:
        """Return the number of rows for ``num_frames`` frames, at least 1: silence follows."""
        whole, rest = divmod(num_frames, self.num_frames)
        rows = whole * (self.num_frames // 2 // self.merged) + -(-rest // 2) // self.merged
        return max(rows, 1)

    def pieces(
        self, features: NDArray[np.float32], num_frames: int | None = None
    ) -> list[GivenPiece]:
        """See MediumEntry: the windows of a sound.

        features: (num_mels, frames of all windows, with padding).
        num_frames: number of frames without padding; None: all.
        """
        size = self.num_frames
        self.check_features(features, size)
        left = features.shape[1] if num_frames is None else num_frames
        left = max(left, 2 * self.merged)
        pieces = []
        for start in range(0, left, size):
            number = min(left - start, size)
            if not (num_rows := -(-number // 2) // self.merged):
                break  # the rest is too short for a row
            inputs = {
                INPUT_FEATURES: features[:, start : start + size],
                KEPT_ROWS: np.arange(num_rows),
            }
            if self.hides_padding:
                inputs[IS_FRAME] = np.arange(size) < number
            pieces.append(GivenPiece(inputs, num_rows))
        return pieces
