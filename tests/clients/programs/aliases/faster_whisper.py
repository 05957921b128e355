"""The name that programs import, for ours; the last two are read by wyoming-faster-whisper."""

import os
from types import SimpleNamespace

from dsbd_ort.speech import faster_whisper as ours
from dsbd_ort.speech.faster_whisper import *  # noqa: F403
from dsbd_ort.speech.languages import LANGUAGE_NAMES


class WhisperModel(ours.WhisperModel):
    """A bundle; DSBD_WHISPER names one to be used for every name of a model."""

    def __init__(self, name, *arguments, **options):
        super().__init__(os.environ.get("DSBD_WHISPER", name), *arguments, **options)


__version__ = "1.2.1"
tokenizer = SimpleNamespace(_LANGUAGE_CODES=tuple(LANGUAGE_NAMES))
