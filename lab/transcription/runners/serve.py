"""Protocol of the tools that transcribe: JSON lines on stdin, answers as JSON lines on stdout.

Tools use the Python of other environments, so this file only imports the standard library and
numpy.

    {"open": JOB}  ->  {"version": "1.2.1", "settings": "compute_type int8"}
    {"transcribe": {"path": "a.wav", "language": "en", "num_beams": 5, "timestamps": false}}
                   ->  {"text": "...", "num_tokens": 12, "seconds": 0.8,
                        "parts": {"features": 0.01, "encoder": 0.3}, "peak_bytes": 300000000}

A failed request is answered by {"error": "..."}, and the tool ends.
"""

import functools
import time
import wave
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.peers.runners.serve import Verb, answer_requests, peak_bytes

Samples = NDArray[np.float32]
FEATURES, ENCODER = "features", "encoder"  # all other time counts as the decoder's


@dataclass(frozen=True, kw_only=True)
class Job:
    """The model to open and its settings.

    Attributes:
        folder: folder that the tool reads: a checkpoint, its conversion, or our bundle.
        precision: "fp32" or "int8".
        num_threads: threads of the tool; OMP_NUM_THREADS has the same value.
        cpu_time: whether to measure CPU time of all threads, for a busy machine.
    """

    folder: str
    precision: str
    num_threads: int
    cpu_time: bool = False


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request; all tools search at temperature 0, without previous text.

    Attributes:
        path: a WAV file (16 bits, 16 kHz, one channel), read before the measured time.
        language: language code.
        num_beams: number of beams; 1: greedy.
        timestamps: whether texts have times.
    """

    path: str
    language: str | None
    num_beams: int
    timestamps: bool


Transcribe = Callable[[Samples, Asked], tuple[str, int]]
"""Returns the text and its number of tokens, including timestamps."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A tool with a loaded model; ``settings``: the settings that determine the result, as text."""

    version: str
    settings: str
    transcribe: Transcribe


class Stopwatch:
    """Seconds spent in methods, by part of the transcription."""

    def __init__(self) -> None:
        self.seconds = {FEATURES: 0.0, ENCODER: 0.0}
        self.clock = time.perf_counter

    def watch(self, owner: type, name: str, part: str) -> None:
        """From now on, count the seconds of a method of a class for ``part``."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def timed(*arguments: Any, **options: Any) -> Any:
            began = self.clock()
            try:
                return method(*arguments, **options)
            finally:
                self.seconds[part] += self.clock() - began

        setattr(owner, name, timed)


def serve(open_job: Callable[[Job, Stopwatch], Opened]) -> None:
    """Answer the requests on stdin until stdin ends."""
    stopwatch, verbs = Stopwatch(), dict[str, Verb]()

    def open_tool(arguments: dict[str, Any]) -> dict[str, Any]:
        job = Job(**arguments)
        stopwatch.clock = time.process_time if job.cpu_time else time.perf_counter
        opened = open_job(job, stopwatch)
        verbs["transcribe"] = lambda asked: _timed(opened.transcribe, Asked(**asked), stopwatch)
        return {"version": opened.version, "settings": opened.settings}

    verbs["open"] = open_tool
    answer_requests(verbs)


def _timed(transcribe: Transcribe, asked: Asked, stopwatch: Stopwatch) -> dict[str, Any]:
    samples = read_samples(asked.path)
    before, began = dict(stopwatch.seconds), stopwatch.clock()
    text, num_tokens = transcribe(samples, asked)
    seconds = stopwatch.clock() - began
    parts = {part: value - before[part] for part, value in stopwatch.seconds.items()}
    return {
        "text": text,
        "num_tokens": num_tokens,
        "seconds": seconds,
        "parts": parts,
        "peak_bytes": peak_bytes(),
    }


def read_samples(path: str) -> Samples:
    """Return the samples of a WAV file, (n,) float32 from -1 to 1."""
    with wave.open(path) as file:
        if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, 16_000):
            raise ValueError(f"{path} is no WAV file of one channel, 16 bits and 16 kHz")
        integers = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return integers.astype(np.float32) / np.float32(32_768)
