"""Speech with known text: WAV files in which eSpeak NG reads ``utterances.jsonl``."""

import json
import os
import subprocess
import tempfile
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsbd_ort.audio.audio_files import SAMPLING_RATE, Samples, read_audio
from lab.frame.page import ROOT

TEXTS = Path(__file__).with_name("utterances.jsonl")
_LOUDEST = 32_767


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """A text and how it is read.

    Attributes:
        name: name of the file; begins with "long" for a long file.
        language: Whisper's code of the language.
        voice: voice of eSpeak NG; a variant follows a plus sign.
        words_per_minute: speed of the voice.
        text: text without digits, because models write numbers differently.
    """

    name: str
    language: str
    voice: str
    words_per_minute: int
    text: str

    @property
    def is_long(self) -> bool:
        """Whether the file has several windows."""
        return self.name.startswith("long")


@dataclass(frozen=True)
class Spoken:
    """An utterance, its file and its duration."""

    utterance: Utterance
    path: Path
    seconds: float


def utterances(path: Path = TEXTS) -> list[Utterance]:
    """Return all texts."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Utterance(**json.loads(line)) for line in lines]


def spoken(folder: Path, texts: Sequence[Utterance], python: Path) -> list[Spoken]:
    """Return the files of texts in a folder (16 kHz, mono); missing files are made.

    python: interpreter that has ``espeakng-loader``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [each for each in texts if not (folder / f"{each.name}.wav").exists()]
    if missing:
        _speak(folder, missing, python)
    files = []
    for each in texts:
        path = folder / f"{each.name}.wav"
        with wave.open(str(path)) as file:
            files.append(Spoken(each, path, file.getnframes() / file.getframerate()))
    return files


def _speak(folder: Path, texts: Sequence[Utterance], python: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        lines = [
            json.dumps(
                {
                    "text": each.text,
                    "voice": each.voice,
                    "words_per_minute": each.words_per_minute,
                    "path": f"{temporary}/{each.name}.wav",
                }
            )
            for each in texts
        ]
        subprocess.run(
            [str(python), "-m", "lab.transcription.runners.run_espeak"],
            input="\n".join(lines),
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for each in texts:
            original = Path(temporary) / f"{each.name}.wav"
            resampled = original.with_suffix(".16k.wav")
            write_wav(resampled, read_audio(original))
            resampled.rename(folder / original.name)


def write_wav(path: Path, samples: Samples) -> None:
    """Write samples, (n,) float32 from -1 to 1 at 16 kHz, as 16-bit integers."""
    integers = np.clip(np.rint(samples * _LOUDEST), -_LOUDEST, _LOUDEST).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, SAMPLING_RATE, 0, "NONE", ""))
        file.writeframes(integers.tobytes())
