"""A runner whose tool counts upwards, or says what a schema names; its options make it fail."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from peers.runners.serve import Answered, Asked, Job, Opened, serve


def convert(job: Job) -> None:
    """Write the precision to a file."""
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
        first = asked.prompt_ids[-1] + 1 + job.options.get("skip", 0)
        return Answered(list(range(first, first + asked.max_new_tokens)), asked.max_new_tokens)

    return Opened(version="1.2", settings="counting", generate=generate)


if __name__ == "__main__":
    serve(open_job, convert)
