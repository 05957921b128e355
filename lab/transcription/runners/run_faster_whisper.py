"""faster-whisper, which uses CTranslate2."""

from typing import Any

import faster_whisper
from faster_whisper.feature_extractor import FeatureExtractor

from lab.transcription.runners.serve import (
    ENCODER,
    FEATURES,
    Asked,
    Job,
    Opened,
    Samples,
    Stopwatch,
    serve,
)

PLAIN: dict[str, Any] = {
    "temperature": [0.0],
    "compression_ratio_threshold": None,
    "log_prob_threshold": None,
    "no_speech_threshold": None,
    "vad_filter": False,
}
TYPE_BY_PRECISION = {"fp32": "float32", "int8": "int8"}


def open_job(job: Job, stopwatch: Stopwatch) -> Opened:
    """Open a folder in CTranslate2's format."""
    model = faster_whisper.WhisperModel(
        job.folder,
        device="cpu",
        compute_type=TYPE_BY_PRECISION[job.precision],
        cpu_threads=job.num_threads,
        num_workers=1,
        local_files_only=True,
    )
    stopwatch.watch(FeatureExtractor, "__call__", FEATURES)
    stopwatch.watch(faster_whisper.WhisperModel, "encode", ENCODER)

    def transcribe(samples: Samples, asked: Asked) -> tuple[str, int]:
        segments, _ = model.transcribe(
            samples,
            language=asked.language,
            beam_size=asked.num_beams,
            condition_on_previous_text=False,
            without_timestamps=not asked.timestamps,
            **PLAIN,
        )
        parts = list(segments)
        return "".join(each.text for each in parts), sum(len(each.tokens) for each in parts)

    settings = f"compute_type {model.model.compute_type}"
    return Opened(version=faster_whisper.__version__, settings=settings, transcribe=transcribe)


if __name__ == "__main__":
    serve(open_job)
