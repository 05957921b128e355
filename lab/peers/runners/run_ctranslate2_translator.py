"""CTranslate2: translations by an encoder-decoder that its own converter wrote."""

from __future__ import annotations

from pathlib import Path

import ctranslate2
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer

from lab.peers.runners.serve import Answered, Asked, Job, Opened, serve, unknown_task

TYPE_BY_PRECISION = {"fp32": "float32", "int8": "int8"}
MODEL = "target"


def convert(job: Job) -> None:
    """Convert the target; the draft is not used."""
    folder = Path(job.folder) / MODEL
    quantization = TYPE_BY_PRECISION[job.precision]
    TransformersConverter(job.target).convert(str(folder), quantization=quantization)


def open_job(job: Job) -> Opened:
    """Open the conversion; ``options``: those of ``translate_batch``."""
    if job.task != "translation":
        raise unknown_task(job)
    translator = ctranslate2.Translator(
        str(Path(job.folder) / MODEL),
        device="cpu",
        compute_type=TYPE_BY_PRECISION[job.precision],
        inter_threads=1,
        intra_threads=job.num_threads,
    )
    tokenizer = Tokenizer.from_file(str(Path(job.target) / "tokenizer.json"))
    token_ids = tokenizer.get_vocab()

    def generate(asked: Asked) -> Answered:
        (result,) = translator.translate_batch(
            [[tokenizer.id_to_token(token) for token in asked.prompt_ids]],
            max_decoding_length=asked.max_new_tokens,
            max_input_length=0,
            length_penalty=1.0,
            return_end_token=True,
            **job.options,
        )
        return Answered([token_ids[token] for token in result.hypotheses[0]])

    settings = f"compute_type {translator.compute_type}"
    if job.precision == "int8":
        settings += ", weights and activations"
    return Opened(version=ctranslate2.__version__, settings=settings, generate=generate)


if __name__ == "__main__":
    serve(open_job, convert)
