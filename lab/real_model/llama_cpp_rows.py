"""Log-probabilities of all tokens behind prompts by llama.cpp, in an environment with xllamacpp.

Reads one JSON object: model, threads, prompts (lists of token ids), vocab_size, output. Writes
(R, V) float32 to output.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import xllamacpp


def main() -> None:
    """Ask for one token behind every prompt, with the whole row of log-probabilities."""
    request = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path = request["model"]
    params.n_ctx, params.n_parallel = 2048, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
    server = xllamacpp.Server(params)
    rows = np.full((len(request["prompts"]), request["vocab_size"]), np.nan, np.float32)
    for row, prompt in zip(rows, request["prompts"], strict=True):
        found = server.handle_completions(
            {
                "prompt": prompt,
                "n_predict": 1,
                "n_probs": len(row),
                "temperature": 0.0,
                "cache_prompt": True,
            }
        )
        tokens = found["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        row[[token["id"] for token in tokens]] = [token["logprob"] for token in tokens]
    if np.isnan(rows).any():
        raise ValueError(f"llama.cpp left out {int(np.isnan(rows).sum())} log-probabilities")
    np.save(request["output"], rows)


if __name__ == "__main__":
    main()
