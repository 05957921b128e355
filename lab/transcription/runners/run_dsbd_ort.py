"""dsbd-ort: transcription with a bundle."""

from typing import Any

import dsbd_ort
from dsbd_ort.audio.log_mel import FeatureWindows, LogMel
from dsbd_runtime.bundle_files.manifest import quantize_option
from dsbd_runtime.parts.source.ort_encoder import OrtEncoder
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
    "temperature": 0.0,
    "compression_ratio_threshold": None,
    "logprob_threshold": None,
    "no_speech_threshold": None,
}


def open_job(job: Job, stopwatch: Stopwatch) -> Opened:
    """Open the bundle."""
    pipe = dsbd_ort.Pipeline.from_bundle(job.folder, num_threads=job.num_threads)
    stopwatch.watch(LogMel, "windows", FEATURES)
    stopwatch.watch(FeatureWindows, "window", FEATURES)
    stopwatch.watch(OrtEncoder, "cross_rows", ENCODER)

    def transcribe(samples: Samples, asked: Asked) -> tuple[str, int]:
        transcript = pipe.transcribe(
            samples,
            language=asked.language,
            num_beams=asked.num_beams,
            return_timestamps=asked.timestamps,
            **PLAIN,
        )
        return transcript.text, sum(len(segment.token_ids) for segment in transcript.segments)

    settings = f"quantization {quantize_option(pipe.bundle.manifest.target.quantization)}"
    return Opened(version=dsbd_ort.__version__, settings=settings, transcribe=transcribe)


if __name__ == "__main__":
    serve(open_job)
