"""llama.cpp by xllamacpp: greedy and sampling, with and without a draft, on GGUF files."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import xllamacpp

from lab.peers.runners.serve import Answered, Asked, Job, Opened, serve, unknown_task

GREEDY: dict[str, Any] = {"temperature": 0.0}
# all other samplers are switched off
SAMPLING: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
OPTIONS_BY_TASK = {"greedy": GREEDY, "greedy-assisted": GREEDY}
OPTIONS_BY_TASK |= {"sampling": SAMPLING, "assisted": SAMPLING}
MOST_DRAFTED = 8


def open_job(job: Job) -> Opened:
    """Open the file of the job's precision in its folder, and draft.gguf if the task drafts."""
    if job.task not in OPTIONS_BY_TASK:
        raise unknown_task(job)
    params = xllamacpp.CommonParams()
    params.model.path = str(Path(job.folder) / f"target-{job.precision}.gguf")
    params.n_ctx, params.n_parallel = 2048, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job.num_threads
    params.cache_prompt = False
    params.warmup = True
    drafts = job.task.endswith("assisted")
    if drafts:
        draft = params.speculative.draft
        draft.mparams.path = str(Path(job.folder) / "draft.gguf")
        draft.n_max = MOST_DRAFTED
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = job.num_threads
        simple = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
        params.speculative.types = [simple]
    server = xllamacpp.Server(params)
    options = OPTIONS_BY_TASK[job.task] | job.options

    def generate(asked: Asked) -> Answered:
        answer = server.handle_completions(
            {
                "prompt": asked.prompt_ids,
                "n_predict": asked.max_new_tokens,
                "ignore_eos": True,
                "return_tokens": True,
                "verbose": True,
                "cache_prompt": False,
                "seed": asked.seed,
                **options,
            }
        )
        if "__verbose" not in answer:
            raise ValueError(str(answer)[:500])
        tokens = answer["__verbose"]["tokens"]
        timings = answer.get("timings", {})
        return Answered(tokens, len(tokens) - timings.get("draft_n_accepted", 0))

    settings = f"{job.precision}, at most {MOST_DRAFTED} drafted" if drafts else job.precision
    return Opened(version=version("xllamacpp"), settings=settings, generate=generate)


if __name__ == "__main__":
    serve(open_job)
