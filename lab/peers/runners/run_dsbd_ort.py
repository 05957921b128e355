"""dsbd-ort: the Pipeline of dsbd-run on a bundle."""

import dataclasses
import functools
import json
from typing import Any

import numpy as np

from dsbd_ort import JsonSchema, Pipeline, TokenTrie, __version__
from dsbd_runtime.bundle_files.manifest import quantize_option
from lab.peers.runners.serve import Answered, Asked, Job, Opened, serve


def open_job(job: Job) -> Opened:
    """Open the bundle; the job's options are those of DecodingConfig.

    Requests share nothing, neither rows of earlier prompts nor text of earlier answers.
    """
    pipeline = Pipeline.from_bundle(
        job.folder, num_threads=job.num_threads, prefix_cache=False, ngram_pool=0
    )

    def generate(asked: Asked) -> Answered:
        ending: dict[str, Any] = {"eos_token_id": ()}
        if asked.json_schema is not None:
            ending = {"constraint": JsonSchema(json.loads(asked.json_schema))}
        if asked.ids_file is not None:
            ending["constraint"] = _trie(asked.ids_file)
        result = pipeline.generate(
            asked.prompt_ids,
            max_new_tokens=asked.max_new_tokens,
            seed=asked.seed,
            **ending,
            **job.options,
        )
        returned = result.sequences
        answered = Answered(returned[0].token_ids, result.stats.num_iterations)
        if asked.ids_file is None:
            return answered
        sequences = [sequence.token_ids for sequence in returned]
        scores = [sequence.score for sequence in returned]
        return dataclasses.replace(answered, sequences=sequences, scores=scores)

    entry = pipeline.bundle.manifest.target
    quantize = quantize_option(entry.quantization)
    settings = f"weights {entry.dtype}, quantization {quantize}, logits {entry.logits}"
    return Opened(version=__version__, settings=settings, generate=generate)


@functools.cache
def _trie(ids_file: str) -> TokenTrie:
    return TokenTrie.from_array(np.load(ids_file))


if __name__ == "__main__":
    serve(open_job)
