"""transformers: Whisper's generate() in fp32."""

import torch
import transformers
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer

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


def open_job(job: Job, stopwatch: Stopwatch) -> Opened:
    """Load the checkpoint."""
    torch.set_num_threads(job.num_threads)
    model = WhisperForConditionalGeneration.from_pretrained(
        job.folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(job.folder)
    tokenizer = WhisperTokenizer.from_pretrained(job.folder)
    is_multilingual = model.generation_config.is_multilingual
    stopwatch.watch(WhisperFeatureExtractor, "__call__", FEATURES)
    stopwatch.watch(type(model.get_encoder()), "forward", ENCODER)

    @torch.inference_mode()
    def transcribe(samples: Samples, asked: Asked) -> tuple[str, int]:
        is_short = len(samples) <= extractor.n_samples
        features = extractor(
            samples,
            sampling_rate=extractor.sampling_rate,
            return_tensors="pt",
            truncation=False,
            padding="max_length" if is_short else "longest",
        ).input_features
        spoken = {"language": asked.language, "task": "transcribe"} if is_multilingual else {}
        output = model.generate(
            features,
            num_beams=asked.num_beams,
            return_timestamps=asked.timestamps,
            return_segments=True,
            temperature=0.0,
            **spoken,
        )
        tokens = [token for each in output["segments"][0] for token in each["tokens"].tolist()]
        text = tokenizer.decode([token for token in tokens if token < model.config.eos_token_id])
        return str(text), len(tokens)

    settings = f"{model.dtype}, attention {model.config._attn_implementation}"
    return Opened(version=transformers.__version__, settings=settings, transcribe=transcribe)


if __name__ == "__main__":
    serve(open_job)
