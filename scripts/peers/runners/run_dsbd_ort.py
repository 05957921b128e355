"""dsbd-ort: the Pipeline of dsbd-run on a bundle."""

from __future__ import annotations

from dsbd_ort import Pipeline, __version__
from peers.runners.serve import Job, Opened, serve


def open_job(job: Job) -> Opened:
    """Open the bundle; the options are those of DecodingConfig."""
    pipeline = Pipeline.from_bundle(job.folder, num_threads=job.num_threads)

    def generate(prompt_ids: list[int], max_new_tokens: int, seed: int) -> list[int]:
        no_end: tuple[int, ...] = ()
        result = pipeline.generate(
            prompt_ids,
            max_new_tokens=max_new_tokens,
            seed=seed,
            eos_token_id=no_end,
            **job.options,
        )
        return result.sequences[0].token_ids

    entry = pipeline.bundle.manifest.target
    settings = f"weights {entry.dtype}, quantization {entry.quantization}, logits {entry.logits}"
    return Opened(version=__version__, settings=settings, generate=generate)


if __name__ == "__main__":
    serve(open_job)
