"""CTranslate2: beam search on weights from its own converter."""

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
    """Open the conversion."""
    if job.task not in ("beam-search", "retrieval"):
        raise unknown_task(job)
    generator = ctranslate2.Generator(
        str(Path(job.folder) / MODEL),
        device="cpu",
        compute_type=TYPE_BY_PRECISION[job.precision],
        inter_threads=1,
        intra_threads=job.num_threads,
    )
    tokenizer = Tokenizer.from_file(str(Path(job.target) / "tokenizer.json"))
    no_token = tokenizer.get_vocab_size()  # end token that is never generated

    def generate(asked: Asked) -> Answered:
        (result,) = generator.generate_batch(
            [[tokenizer.id_to_token(token) for token in asked.prompt_ids]],
            max_length=asked.max_new_tokens,
            include_prompt_in_result=False,
            end_token=[no_token],
            length_penalty=1.0,
            return_scores=job.task == "retrieval",
            **job.options,
        )
        if job.task == "retrieval":
            sequences: list[list[int]] = result.sequences_ids
            return Answered(sequences[0], None, sequences, result.scores)
        new_tokens: list[int] = result.sequences_ids[0]
        return Answered(new_tokens)

    settings = f"compute_type {generator.compute_type}"
    if job.precision == "int8":
        settings += ", weights and activations"
    return Opened(version=ctranslate2.__version__, settings=settings, generate=generate)


if __name__ == "__main__":
    serve(open_job, convert)
