"""transformers: generate() in fp32."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from peers.runners.serve import Job, Opened, serve, unknown_task

OPTIONS_BY_TASK: dict[str, dict[str, Any]] = {
    "beam-search": {"do_sample": False, "early_stopping": False, "length_penalty": 1.0},
    "beam-sampling": {"do_sample": True},
    "assisted": {"do_sample": True},
    "sampling": {"do_sample": True},
}


def open_job(job: Job) -> Opened:
    """Load the checkpoints and return generate() for the task."""
    if job.precision != "fp32" or job.task not in OPTIONS_BY_TASK:
        raise unknown_task(job)
    torch.set_num_threads(job.num_threads)
    target = _model(job.target)
    assistant = {"assistant_model": _model(job.draft)} if job.task == "assisted" else {}
    options = OPTIONS_BY_TASK[job.task] | job.options

    @torch.inference_mode()
    def generate(prompt_ids: list[int], max_new_tokens: int, seed: int) -> list[int]:
        torch.manual_seed(seed)
        prompt = torch.tensor([prompt_ids])
        # a config without an end token: every sequence has the full length
        config = GenerationConfig(max_new_tokens=max_new_tokens, pad_token_id=0, **options)
        output = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=config,
            **assistant,
        )
        new_tokens: list[int] = output[0, len(prompt_ids) :].tolist()
        return new_tokens

    settings = f"{target.dtype}, attention {target.config._attn_implementation}"
    return Opened(version=transformers.__version__, settings=settings, generate=generate)


def _model(folder: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)  # the checkpoint's has an end token
    return model


if __name__ == "__main__":
    serve(open_job)
