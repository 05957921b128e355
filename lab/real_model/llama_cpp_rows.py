"""llama.cpp's log-probabilities of all tokens after each prompt; runs where xllamacpp is installed.

Reads one JSON object from stdin: model, threads, prompts (lists of token ids), vocab_size, output.
Writes (R, V) float32 to the file ``output``, row by row.
"""

import array
import json
import math
import sys

import xllamacpp


def main() -> None:
    """Generate one token after every prompt, with the log-probabilities of all tokens."""
    request = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path = request["model"]
    params.n_ctx, params.n_parallel = 2048, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
    server = xllamacpp.Server(params)
    size = request["vocab_size"]
    with open(request["output"], "wb") as output:
        for prompt in request["prompts"]:
            answer = server.handle_completions(
                {
                    "prompt": prompt,
                    "n_predict": 1,
                    "n_probs": size,
                    "temperature": 0.0,
                    "cache_prompt": True,
                }
            )
            row = array.array("f", [math.nan]) * size
            for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
                row[token["id"]] = token["logprob"]
            if any(map(math.isnan, row)):
                raise ValueError("llama.cpp left out some of the log-probabilities")
            row.tofile(output)


if __name__ == "__main__":
    main()
