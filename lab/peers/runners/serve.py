"""Protocol of all runners: requests as JSON lines on stdin, answers as JSON lines on stdout.

Runners use the Python of other environments, so this file only imports the standard library.

    {"convert": JOB}  ->  {}
    {"open": JOB}     ->  {"version": "4.8.5", "settings": "beam_size 4, no end token"}
    {"generate": {"prompt_ids": [0, 5], "max_new_tokens": 2, "seed": 3, "json_schema": null,
                  "ids_file": null}}
                      ->  {"token_ids": [7, 8], "num_iterations": 2, "sequences": null,
                           "scores": null, "seconds": 0.1, "peak_bytes": 300000000}

A failed request is answered by {"error": "..."}, and the runner ends.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Job:
    """The models that a runner opens or converts, and the task.

    Attributes:
        target, draft: checkpoint folders in Hugging Face layout.
        folder: folder of the tool's conversion, or our bundle.
        precision: "fp32" or "int8".
        task: "beam-search", "beam-sampling", "assisted" or "sampling", with sequences of the full
            length; "json-beam-search" or "json-sampling", with documents that end as their schema
            requires; or "retrieval", a beam search that returns all beams, restricted to the ids
            of a file if the tool can do that.
        options: further options of the task, in the tool's words.
        num_threads: threads of the tool; OMP_NUM_THREADS has the same value.
    """

    target: str
    draft: str
    folder: str
    precision: str
    task: str
    options: dict[str, Any]
    num_threads: int


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request.

    Attributes:
        json_schema: text of the schema for the answer; None for free text.
        ids_file: a .npy file of all ids, (num_ids, length) tokens; None except in retrieval. The
            first request, which is not counted, reads it.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    seed: int
    json_schema: str | None = None
    ids_file: str | None = None


@dataclass(frozen=True)
class Answered:
    """The answer to a request.

    Attributes:
        token_ids: new tokens of the best sequence.
        num_iterations: iterations of the target; None if the tool does not report them.
        sequences: new tokens of every sequence, best first; None except in retrieval.
        scores: the tool's scores of these sequences; None if it does not report them.
    """

    token_ids: list[int]
    num_iterations: int | None = None
    sequences: list[list[int]] | None = None
    scores: list[float] | None = None


Generate = Callable[[Asked], Answered]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A tool with loaded models.

    Attributes:
        version: version of the tool.
        settings: the settings that determine the result, as text.
    """

    version: str
    settings: str
    generate: Generate


Verb = Callable[[dict[str, Any]], dict[str, Any]]
"""Handles a verb of the protocol: takes its arguments, returns the answer."""


def serve(open_job: Callable[[Job], Opened], convert: Callable[[Job], None] | None = None) -> None:
    """Answer the requests on stdin until stdin ends."""
    verbs: dict[str, Verb] = {}

    def open_tool(arguments: dict[str, Any]) -> dict[str, Any]:
        opened = open_job(Job(**arguments))
        verbs["generate"] = lambda asked: _timed(opened.generate, Asked(**asked))
        return {"version": opened.version, "settings": opened.settings}

    def convert_models(arguments: dict[str, Any]) -> dict[str, Any]:
        assert convert is not None  # otherwise the verb does not exist
        convert(Job(**arguments))
        return {}

    verbs["open"] = open_tool
    if convert is not None:
        verbs["convert"] = convert_models
    answer_requests(verbs)


def answer_requests(verbs: Mapping[str, Verb]) -> None:
    """Answer the requests on stdin until it ends or a request fails; a verb may add other verbs."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    for line in sys.stdin:
        ((verb, arguments),) = json.loads(line).items()
        try:
            if verb not in verbs:
                raise ValueError(f"this runner cannot {verb} now")
            answer = verbs[verb](arguments)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "error" in answer:
            sys.exit(1)


def unknown_task(job: Job) -> ValueError:
    """Return the error for a task that the runner does not support."""
    return ValueError(f"task {job.task!r} in {job.precision} is not among this runner's")


def end_token_of(checkpoint: str | Path) -> int:
    """Return the id of the token that ends a text, from a checkpoint's config.json."""
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    return int(config["eos_token_id"])


def _timed(generate: Generate, asked: Asked) -> dict[str, Any]:
    start = time.perf_counter()
    answered = generate(asked)
    seconds = time.perf_counter() - start
    return {
        "token_ids": [int(token) for token in answered.token_ids],
        "num_iterations": answered.num_iterations,
        "sequences": _plain(answered.sequences),
        "scores": answered.scores and [float(score) for score in answered.scores],
        "seconds": seconds,
        "peak_bytes": peak_bytes(),
    }


def _plain(sequences: list[list[int]] | None) -> list[list[int]] | None:
    """Convert the tool's integers to int, as JSON needs them."""
    return sequences and [[int(token) for token in sequence] for sequence in sequences]


def peak_bytes() -> int:
    """Return the peak resident memory of this process, including mapped file pages."""
    status = Path("/proc/self/status").read_text()
    (kilobytes,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(kilobytes) * 1024
