"""faster-whisper's API over a bundle."""

from dsbd_ort.speech.faster_whisper.model import (
    BatchedInferencePipeline,
    WhisperModel,
    decode_audio,
)
from dsbd_ort.speech.faster_whisper.records import (
    Segment,
    TranscriptionInfo,
    TranscriptionOptions,
    Word,
)
from dsbd_ort.speech.voice_activity import VadOptions

__all__ = [
    "BatchedInferencePipeline",
    "Segment",
    "TranscriptionInfo",
    "TranscriptionOptions",
    "VadOptions",
    "WhisperModel",
    "Word",
    "decode_audio",
]
