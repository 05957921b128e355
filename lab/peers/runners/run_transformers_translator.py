"""transformers: generate() of an encoder-decoder in fp32, until the end token."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModelForSeq2SeqLM

from lab.peers.runners.serve import Answered, Asked, Job, Opened, serve, unknown_task


def open_job(job: Job) -> Opened:
    """Load the checkpoint; ``options``: those of ``generate``."""
    if job.precision != "fp32" or job.task != "translation":
        raise unknown_task(job)
    torch.set_num_threads(job.num_threads)
    model = AutoModelForSeq2SeqLM.from_pretrained(job.target, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(asked: Asked) -> Answered:
        source = torch.tensor([asked.prompt_ids])
        output = model.generate(
            source,
            attention_mask=torch.ones_like(source),
            max_new_tokens=asked.max_new_tokens,
            do_sample=False,
            length_penalty=1.0,
            early_stopping=False,
            **job.options,
        )
        return Answered(output[0, 1:].tolist())  # behind the start token

    settings = f"{model.dtype}, attention {model.config._attn_implementation}"
    return Opened(version=transformers.__version__, settings=settings, generate=generate)


if __name__ == "__main__":
    serve(open_job)
