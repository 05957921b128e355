"""The published DSBD code: beam_speculative_sampling of a checkout, in fp32 on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from lab.peers.runners.serve import Answered, Asked, Job, Opened, serve, unknown_task

NO_TOKEN = -1


def open_job(job: Job) -> Opened:
    """Load the checkpoints into the checkout's own model class; bfloat16 is its GPU default."""
    if job.precision != "fp32" or job.task != "beam-sampling":
        raise unknown_task(job)
    sys.path.insert(0, job.folder)
    from sampling import beam_speculative_sampling  # where it lies is known only now
    from sampling.models.modeling_llama import LlamaForCausalLM

    torch.set_num_threads(job.num_threads)
    target, draft = (
        LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
        for folder in (job.target, job.draft)
    )

    def generate(asked: Asked) -> Answered:
        torch.manual_seed(asked.seed)
        output = beam_speculative_sampling(
            torch.tensor([asked.prompt_ids]),
            draft,
            target,
            eos_token_id=NO_TOKEN,
            pad_token_id=0,
            max_len=asked.max_new_tokens,
            **job.options,
        )
        # its last round may end beyond the limit: those tokens count as well
        new_tokens: list[int] = output[0, len(asked.prompt_ids) :].tolist()
        return Answered(new_tokens)

    return Opened(version=_commit(Path(job.folder)), settings="float32", generate=generate)


def _commit(checkout: Path) -> str:
    """Return the start of the checkout's commit, if known."""
    head = checkout / ".git" / "HEAD"
    if not head.is_file():
        return "unknown commit"
    text = head.read_text().strip()
    reference = checkout / ".git" / text.removeprefix("ref: ")
    return (reference.read_text().strip() if reference.is_file() else text)[:10]


if __name__ == "__main__":
    serve(open_job)
