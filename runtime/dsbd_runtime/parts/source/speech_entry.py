"""Speech models: the manifest entries of their sound and tokens, and sound as a source.

The encoder reads windows of sound as log-mel features; all windows have the same length. The
decoder begins after tokens for the spoken language, the task, and whether the text has times.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.errors import BundleError
from dsbd_runtime.parts.source.source_values import SourceValues
from dsbd_runtime.typed_json import check_counts, mismatch, name_in_short

Features = NDArray[np.float32]

FRAMES_A_POSITION = 2
"""Frames that the encoder joins, by the stride of its second convolution."""

ALIGNMENT_FILE = "alignment.onnx"
ALIGNMENT_WEIGHTS = "alignment_weights"
_WIDEST_FILTER = 99
_MOST_SAMPLES = 300 * 48_000  # in a window: five minutes at the highest rate, 58 MB

LARGEST_SOUND = {
    "sampling_rate": 48_000,
    "num_mels": 512,
    "n_fft": 4_096,
    "hop_length": 4_096,
    "chunk_seconds": 300,
    "num_frames": 30_000,
}
"""Largest accepted values of the settings of sound, at least ten times those of Whisper.

They decide the memory and time of every request.
"""


@dataclass(frozen=True, kw_only=True)
class AlignmentEntry:
    """Manifest entry of the graph that returns how the alignment heads attend to the sound."""

    median_filter_width: int  # positions of the median that smooths a token's weights; odd
    max_abs_error: float  # largest difference of a weight from the checkpoint's at the export


class SoundFeatures(SourceValues):
    """The log-mel features of one window, (num_mels, num_frames)."""

    axes = ("mels", "frames")


@dataclass(frozen=True, kw_only=True)
class SpeechEntry:
    """Manifest entry of the sound that an encoder reads, and of the tokens that are not text.

    Attributes:
        n_fft: samples of a frame.
        hop_length: samples from one frame to the next.
        chunk_seconds, num_frames: length of a window, the sound that the encoder reads in one run.
        no_timestamps_token_id: the token for a text without times. The ids after it are times, from
            the start of the window to its end; the ids after the times are text again.
        previous_token_id: the token before the text of earlier speech.
        no_speech_token_id: its probability after the start token is the no-speech probability.
        suppress_tokens: tokens that are never part of a text.
        begin_suppress_tokens: tokens that never begin a text.
        languages: the token of each language by its code; None for a model of English alone.
        tasks: the token of each task, "transcribe" and "translate"; None for a model of English.
        language: code of the language for requests without one; None: it is detected.
        max_initial_timestamp_index: the last time that a text may begin with; None: any time.
        alignment_heads: layer and head of the attentions that follow the sound; None: not known.
        alignment: entry of the graph of these heads, which the times of words need; None: the
            bundle has no such graph, or the model is a draft.
    """

    sampling_rate: int
    num_mels: int
    n_fft: int
    hop_length: int
    chunk_seconds: int
    num_frames: int
    no_timestamps_token_id: int
    previous_token_id: int
    no_speech_token_id: int
    suppress_tokens: list[int]
    begin_suppress_tokens: list[int]
    languages: dict[str, int] | None = None
    tasks: dict[str, int] | None = None
    language: str | None = None
    max_initial_timestamp_index: int | None = None
    alignment_heads: list[list[int]] | None = None
    alignment: AlignmentEntry | None = None

    input_name: ClassVar[str] = "input_features"
    source_type: ClassVar[type[SourceValues]] = SoundFeatures
    noun: ClassVar[str] = "sound"

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_mels, self.num_frames

    @property
    def first_timestamp(self) -> int:
        """The token of the time 0."""
        return self.no_timestamps_token_id + 1

    @property
    def num_positions(self) -> int:
        """Positions of a window after the encoder, which joins two frames."""
        return self.num_frames // FRAMES_A_POSITION

    @property
    def last_timestamp(self) -> int:
        """The token of the window's end. A model may have later tokens; they are no times."""
        return self.first_timestamp + self.num_positions

    def is_time(self, token_id: int) -> bool:
        return self.first_timestamp <= token_id <= self.last_timestamp

    @property
    def seconds_per_frame(self) -> float:
        return self.hop_length / self.sampling_rate

    @property
    def features(self) -> tuple[int, int, int, int, int]:
        """Settings of the features; equal for two models that read the same features."""
        frames = self.num_frames, self.num_mels
        return (self.sampling_rate, self.n_fft, self.hop_length, *frames)


def check_sound(settings: dict[str, int], where: str) -> None:
    """Raise BundleError unless the settings of sound are consistent and within their limits."""
    for name, upper in LARGEST_SOUND.items():
        check_counts({name: settings[name]}, where, upper)
    num_samples = settings["chunk_seconds"] * settings["sampling_rate"]
    num_frames = num_samples // settings["hop_length"]
    if settings["num_frames"] != num_frames:
        expected = f"{num_frames}, the frames of {settings['chunk_seconds']} s"
        raise mismatch(expected, settings["num_frames"], f"{where}: num_frames")
    if not settings["n_fft"] <= num_samples <= _MOST_SAMPLES:
        expected = f"{settings['n_fft']} to {_MOST_SAMPLES}, those of a frame and of five minutes"
        raise mismatch(expected, num_samples, f"{where}: chunk_seconds: samples of a window")


def check_speech(speech: SpeechEntry, vocab_size: int, where: str) -> None:
    """Raise BundleError unless an entry is consistent; ``vocab_size``: the decoder's."""
    check_sound({name: getattr(speech, name) for name in LARGEST_SOUND}, where)
    tokens = {
        name: getattr(speech, name)
        for name in ("no_timestamps_token_id", "previous_token_id", "no_speech_token_id")
    }
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        tokens |= {f"{name}[{i}]": token for i, token in enumerate(getattr(speech, name))}
    tokens |= {**(speech.languages or {}), **(speech.tasks or {})}
    for name, token in tokens.items():
        if not 0 <= token < vocab_size:
            raise mismatch(f"0 to {vocab_size - 1}", token, f"{where}: {name_in_short(name)}")
    if (speech.languages is None) != (speech.tasks is None):
        raise BundleError(
            f"{where} has languages or tasks alone; expected both, or neither of a model of "
            "English; export the bundle again"
        )
    if speech.language is not None and speech.language not in (speech.languages or {}):
        expected = f"one of {', '.join(list(speech.languages or {})[:5])}, ..."
        raise mismatch(expected, speech.language, f"{where}: language")
    if (speech.max_initial_timestamp_index or 0) < 0:
        place = f"{where}: max_initial_timestamp_index"
        raise mismatch("a number from 0 on", speech.max_initial_timestamp_index, place)
    if speech.alignment is not None:
        _check_alignment(speech.alignment, speech.alignment_heads, where)


def _check_alignment(alignment: AlignmentEntry, heads: list[list[int]] | None, where: str) -> None:
    if not heads or not all(len(head) == 2 and min(head) >= 0 for head in heads):
        expected = "the layer and head of each, which its alignment graph weighs"
        raise mismatch(expected, heads, f"{where}: alignment_heads")
    width = alignment.median_filter_width
    if not 1 <= width <= _WIDEST_FILTER or width % 2 == 0:
        expected = f"an odd number from 1 to {_WIDEST_FILTER}"
        raise mismatch(expected, width, f"{where}: alignment: median_filter_width")
