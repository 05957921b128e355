"""A runner whose tool counts upwards; its options make it fail.

It says what a schema names, and finds the first ids of a file.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

from lab.peers.runners.serve import Answered, Asked, Job, Opened, serve


def convert(job: Job) -> None:
    if job.precision == "int8":
        raise ValueError("no int8 here")
    (Path(job.folder) / "model").write_text(job.precision)


def open_job(job: Job) -> Opened:
    """Return what counts upwards from the prompt's last token."""
    if "missing" in job.options:
        raise FileNotFoundError(job.options["missing"])
    print("printed by a library")

    def generate(asked: Asked) -> Answered:
        if "crash" in job.options:
            print("segmentation fault", file=sys.stderr, flush=True)
            os._exit(3)
        if asked.json_schema is not None:
            return Answered(json.loads(asked.json_schema)["tokens"])
        if asked.ids_file is not None:
            sequences = np.load(asked.ids_file)[: job.options["num_beams"]].tolist()
            scores = [-0.5 * index for index in range(len(sequences))]
            return Answered(sequences[0], None, [[*sequences[0], 9], *sequences], [0.25, *scores])
        first = asked.prompt_ids[-1] + 1 + job.options.get("skip", 0)
        return Answered(list(range(first, first + asked.max_new_tokens)), asked.max_new_tokens)

    return Opened(version="1.2", settings="counting", generate=generate)


if __name__ == "__main__":
    serve(open_job, convert)
