"""Sounds that an encoder reads into a prompt, as a whole or in Whisper's windows: see MediumEntry.

The sound of Qwen3-ASR is in ``given_medium``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.encoder_entry import INPUT_FEATURES
from dsbd_runtime.parts.given_medium import CTC_LOGITS, KEPT_ROWS, MediumEntry
from dsbd_runtime.parts.given_prompt import GivenPiece
from dsbd_runtime.parts.part import BOOL, FLOAT32, INT64, Tensors, TensorSpec
from dsbd_runtime.parts.speech_entry import LARGEST_SOUND
from dsbd_runtime.typed_json import check_counts, mismatch

IS_FRAME = "is_frame"
WINDOW_PAIRS = "window_pairs"
_SIZES = ("sampling_rate", "num_mels", "n_fft", "hop_length")
_MOST_FRAMES = LARGEST_SOUND["num_frames"]
_NUM_CODES = 256  # of Latin-1, the first characters of an encoder that spells what it hears
_MOST_CHARACTERS = 2**17


@dataclass(frozen=True, kw_only=True)
class StackedSound(MediumEntry):
    """Sound as pairs of log-mel frames: a conformer reads the whole, a Q-Former each window of it.

    | tensor of the encoder | shape, type | meaning |
    |---|---|---|
    | input_features | [B,P,2M] float32 | B blocks of P pairs of frames; zeros at the end |
    | is_frame | [B,P] bool | the pairs without padding |
    | window_pairs | [Q,N] int64 | the pairs of each window, BP after the last one |
    | ctc_logits | [T,C] float32 | an output if C > 0: what each of the T = BP pairs spells |

    Attributes:
        recipe: the name of the prompts that transcribe it.
        n_fft: samples of a frame, with a window of ``window_length`` samples in its middle.
        hop_length: samples from one frame to the next.
        num_mels: M.
        block_pairs: P, which attend among each other.
        window_pairs: N, which become ``window_rows`` rows.
        num_characters: C: no character, Latin-1 from 1 on, then those that have no code here.
    """

    kind: str = "stacked-sound"
    recipe: str
    sampling_rate: int
    num_mels: int
    n_fft: int
    window_length: int
    hop_length: int
    block_pairs: int
    window_pairs: int
    window_rows: int
    num_characters: int = 0

    @property
    def encoder_inputs(self) -> Tensors:
        return {
            INPUT_FEATURES: TensorSpec(FLOAT32, (None, self.block_pairs, 2 * self.num_mels)),
            IS_FRAME: TensorSpec(BOOL, (None, self.block_pairs)),
            WINDOW_PAIRS: TensorSpec(INT64, (None, self.window_pairs)),
        }

    @property
    def encoder_outputs(self) -> Tensors:
        if not self.num_characters:
            return {}
        return {CTC_LOGITS: TensorSpec(FLOAT32, (None, self.num_characters))}

    def check(self, where: str) -> None:
        for name in _SIZES:
            check_counts({name: getattr(self, name)}, where, LARGEST_SOUND[name])
        check_counts({"window_length": self.window_length}, where, self.n_fft)
        for name in ("block_pairs", "window_pairs"):
            check_counts({name: getattr(self, name)}, where, _MOST_FRAMES)
        check_counts({"window_rows": self.window_rows}, where, self.window_pairs)
        if not 0 <= self.num_characters <= _MOST_CHARACTERS:
            expected = f"0 to {_MOST_CHARACTERS}"
            raise mismatch(expected, self.num_characters, f"{where}: num_characters")

    def num_rows(self, num_frames: int) -> int:
        """Return the rows of a sound of so many frames; an odd one at the end is dropped."""
        return -(-(num_frames // 2) // self.window_pairs) * self.window_rows

    def pieces(self, features: NDArray[np.float32]) -> list[GivenPiece]:
        """See MediumEntry: one piece, of (num_mels, num_frames), at least two frames."""
        _check_features(features, self.num_mels, 2)
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
        """See MediumEntry: the first label is no character."""
        heard = labels[np.diff(labels, prepend=-1) != 0]  # a character may last for several pairs
        return "".join(map(chr, heard[(heard > 0) & (heard < _NUM_CODES)].tolist()))


@dataclass(frozen=True, kw_only=True)
class WindowedSound(MediumEntry):
    """Sound as log-mel features of windows of one length, each padded with silence.

    | input of the encoder | shape, type | meaning |
    |---|---|---|
    | input_features | [M,F] float32 | the F frames of a window |
    | kept_rows | [E] int64 | the rows without padding |
    | is_frame | [F] bool | if ``hides_padding``: the frames without padding |

    Attributes:
        recipe: the name of the prompts that transcribe it.
        n_fft: samples of a frame.
        hop_length: samples from one frame to the next.
        num_frames: F.
        merged: positions of the encoder, of two frames each, that become one row.
        hides_padding: whether the encoder's attention sees no padding.
        most_windows: of one sound.
    """

    kind: str = "windowed-sound"
    recipe: str
    sampling_rate: int
    num_mels: int
    n_fft: int
    hop_length: int
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
        for name in (*_SIZES, "num_frames"):
            check_counts({name: getattr(self, name)}, where, LARGEST_SOUND[name])
        check_counts({"merged": self.merged, "most_windows": self.most_windows}, where)
        if self.num_frames % (2 * self.merged):
            expected = f"a multiple of {2 * self.merged}, the frames of a row"
            raise mismatch(expected, self.num_frames, f"{where}: num_frames")

    def num_rows(self, num_frames: int) -> int:
        """Return the rows of a sound of so many frames: at least 1, as silence follows."""
        whole, rest = divmod(num_frames, self.num_frames)
        rows = whole * (self.num_frames // 2 // self.merged) + -(-rest // 2) // self.merged
        return max(rows, 1)

    def pieces(
        self, features: NDArray[np.float32], num_frames: int | None = None
    ) -> list[GivenPiece]:
        """See MediumEntry: the windows of a sound.

        features: (num_mels, frames of all windows, with padding).
        num_frames: those without padding; None: all.
        """
        size = self.num_frames
        _check_features(features, self.num_mels, size)
        left = features.shape[1] if num_frames is None else num_frames
        left = max(left, 2 * self.merged)
        pieces = []
        for start in range(0, left, size):
            number = min(left - start, size)
            if not (num_rows := -(-number // 2) // self.merged):
                break  # too short an end for a row
            inputs = {
                INPUT_FEATURES: features[:, start : start + size],
                KEPT_ROWS: np.arange(num_rows),
            }
            if self.hides_padding:
                inputs[IS_FRAME] = np.arange(size) < number
            pieces.append(GivenPiece(inputs, num_rows))
        return pieces


def _check_features(features: NDArray[np.float32], num_mels: int, least: int) -> None:
    shape = features.shape
    if len(shape) != 2 or shape[0] != num_mels or shape[1] < least:
        raise InputError(
            f"the features of a sound have shape {shape}, expected ({num_mels}, number of "
            f"frames), at least {least} frames"
        )
