"""Media that an encoder reads into a prompt: manifest entries, and how each is cut into pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.encoder_entry import INPUT_FEATURES
from dsbd_runtime.parts.given_prompt import GivenPiece
from dsbd_runtime.parts.part import FLOAT32, INT64, Tensors, TensorSpec
from dsbd_runtime.parts.speech_entry import LARGEST_SOUND
from dsbd_runtime.typed_json import check_counts, mismatch

KEPT_ROWS = "kept_rows"
CTC_LOGITS = "ctc_logits"
"""An output of encoders that also spell what they hear."""
_NUM_HALVINGS = 3  # of the frames of a chunk, by convolutions of stride 2
_LARGEST_CHUNKS = {
    **{name: LARGEST_SOUND[name] for name in ("sampling_rate", "num_mels", "n_fft", "hop_length")},
    "chunk_frames": LARGEST_SOUND["num_frames"],
    "window_frames": LARGEST_SOUND["num_frames"],
    "least_samples": 300 * LARGEST_SOUND["sampling_rate"],
}


@dataclass(frozen=True, kw_only=True)
class MediumEntry:
    """Manifest entry of a medium and its front end; each kind is a class."""

    @property
    def kind(self) -> str:
        """The name of the kind, by which a manifest finds the class: a field of each class."""
        raise NotImplementedError

    @property
    def encoder_inputs(self) -> Tensors:
        """The inputs of the encoder's graph for one piece."""
        raise NotImplementedError

    @property
    def encoder_outputs(self) -> Tensors:
        """The outputs of that graph in addition to the rows."""
        return {}

    def spelled(self, labels: NDArray[np.int64]) -> str:
        """Return the text of the most probable CTC labels, (T,), "" without such an output."""
        return ""

    def pieces(self, features: NDArray[Any]) -> list[GivenPiece]:
        """Return the runs of the encoder for one medium; InputError: features of another shape."""
        raise NotImplementedError

    def check(self, where: str) -> None:
        """Raise BundleError unless the values are consistent and a request can pay for them."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ChunkedSound(MediumEntry):
    """Sound as log-mel frames, in chunks that are convolved alone, and windows that attend alone.

    | input of the encoder | shape, type | meaning |
    |---|---|---|
    | input_features | [T,M,F] float32 | T chunks of F frames of M mels; zeros at the end |
    | kept_rows | [N] int64 | the rows without padding, of the T chunks one after the other |

    Attributes:
        recipe: the name of the prompts that transcribe it.
        n_fft: samples of a frame.
        hop_length: samples from one frame to the next.
        chunk_frames: frames of a chunk, F. 100 frames become 50, 25, 13 rows.
        window_frames: most frames of a window, a multiple of ``chunk_frames``.
        least_samples: shorter sounds are padded with zeros to this length.
    """

    kind: str = "chunked-sound"
    recipe: str = "qwen3_asr"
    sampling_rate: int
    num_mels: int
    n_fft: int
    hop_length: int
    chunk_frames: int
    window_frames: int
    least_samples: int

    @property
    def encoder_inputs(self) -> Tensors:
        shape = None, self.num_mels, self.chunk_frames
        return {INPUT_FEATURES: TensorSpec(FLOAT32, shape), KEPT_ROWS: TensorSpec(INT64, ("E",))}

    def check(self, where: str) -> None:
        for name, most in _LARGEST_CHUNKS.items():
            check_counts({name: getattr(self, name)}, where, most)
        if self.window_frames % self.chunk_frames:
            expected = f"a multiple of chunk_frames, {self.chunk_frames}"
            raise mismatch(expected, self.window_frames, f"{where}: window_frames")

    def num_rows(self, num_frames: int) -> int:
        """Return the rows of a sound of so many frames."""
        whole, rest = divmod(num_frames, self.chunk_frames)
        return whole * _halved(self.chunk_frames) + _halved(rest)

    def pieces(self, features: NDArray[np.float32]) -> list[GivenPiece]:
        """See MediumEntry: the windows of a sound, of (num_mels, num_frames) without padding."""
        num_mels, num_frames = features.shape if features.ndim == 2 else (0, 0)
        if num_mels != self.num_mels or not num_frames:
            raise InputError(
                f"the features of a sound have shape {features.shape}, expected "
                f"({self.num_mels}, number of frames), at least one frame"
            )
        pieces = []
        for start in range(0, num_frames, self.window_frames):
            window = features[:, start : start + self.window_frames]
            num_chunks = -(-window.shape[1] // self.chunk_frames)
            padded = np.zeros((self.num_mels, num_chunks * self.chunk_frames), np.float32)
            padded[:, : window.shape[1]] = window
            chunks = padded.reshape(self.num_mels, num_chunks, self.chunk_frames)
            num_rows = self.num_rows(window.shape[1])
            inputs = {INPUT_FEATURES: chunks.transpose(1, 0, 2), KEPT_ROWS: np.arange(num_rows)}
            pieces.append(GivenPiece(inputs, num_rows))
        return pieces


def _halved(num_frames: int) -> int:
    """Return the rows of the frames of one chunk."""
    for _ in range(_NUM_HALVINGS):
        num_frames = -(-num_frames // 2)
    return num_frames
