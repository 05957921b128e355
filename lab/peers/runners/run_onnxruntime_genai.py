"""onnxruntime-genai: beam search, drafting and guidance, on models from its own builder."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime_genai

from lab.peers.runners.serve import (
    Answered,
    Asked,
    Job,
    Opened,
    end_token_of,
    serve,
    unknown_task,
)

CONFIG = "genai_config.json"
ROLES = ("target", "draft")
BEAM_SEARCH: dict[str, Any] = {
    "do_sample": False,
    "early_stopping": False,
    "length_penalty": 1.0,
}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_p": 1.0}
OPTIONS_BY_TASK: dict[str, dict[str, Any]] = {
    "beam-search": BEAM_SEARCH,
    "assisted": SAMPLING,
    "sampling": SAMPLING,
    "retrieval": BEAM_SEARCH,
    "json-beam-search": BEAM_SEARCH,
    "json-sampling": SAMPLING,
}


def convert(job: Job) -> None:
    """Build both models in one folder, because a configuration cannot refer to files outside it."""
    folder = Path(job.folder)
    for role in ROLES:
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-e", "cpu"]
        command += ["-i", getattr(job, role), "-p", job.precision]
        command += ["-o", str(folder / role), "-c", str(folder / "cache")]
        subprocess.run(command, check=True)
    config = json.loads((folder / "target" / CONFIG).read_text())
    # The end token cannot be switched off or set beyond the vocabulary (0.18.0). The begin token is
    # generated only after an end; such a sequence is too short.
    config["model"]["eos_token_id"] = config["model"]["bos_token_id"]
    config["model"]["decoder"]["filename"] = "target/model.onnx"
    (folder / CONFIG).write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((folder / "target" / name).read_bytes())


def open_job(job: Job) -> Opened:
    """Open the built models, and the draft if the task needs it."""
    if job.task not in OPTIONS_BY_TASK:
        raise unknown_task(job)
    config = onnxruntime_genai.Config(job.folder)
    config.overlay(json.dumps(_overlay(job)))
    model = onnxruntime_genai.Model(config)

    def generate(asked: Asked) -> Answered:
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(
            max_length=len(asked.prompt_ids) + asked.max_new_tokens,
            random_seed=asked.seed,
            **OPTIONS_BY_TASK[job.task] | job.options,
        )
        if asked.json_schema is not None:
            params.set_guidance("json_schema", asked.json_schema)
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(asked.prompt_ids)
        while not generator.is_done():
            generator.generate_next_token()
        sequences = [
            generator.get_sequence(index)[len(asked.prompt_ids) :].tolist()
            for index in range(job.options.get("num_return_sequences", 1))
        ]
        num_iterations = _num_iterations(generator, job, len(sequences[0]))
        return Answered(
            sequences[0], num_iterations, sequences if job.task == "retrieval" else None
        )

    settings = "CPU provider"
    if job.precision == "int8":
        settings += ", weights as its model builder quantizes them"
    return Opened(version=onnxruntime_genai.__version__, settings=settings, generate=generate)


def _num_iterations(generator: Any, job: Job, num_tokens: int) -> int | None:
    """Return the number of drafting rounds plus one for every other token."""
    if job.task != "assisted":
        return num_tokens
    stats = generator.get_speculative_stats()
    return int(stats["rounds"] + num_tokens - stats["tokens_emitted"])


def _overlay(job: Job) -> dict[str, Any]:
    """Return the job's changes to the configuration that the conversion wrote."""
    threads = {"session_options": {"intra_op_num_threads": job.num_threads}}
    model: dict[str, Any] = {"decoder": threads}
    if job.task == "assisted":
        built = json.loads((Path(job.folder) / "draft" / CONFIG).read_text())
        model["draft"] = built["model"]["decoder"] | {"filename": "draft/model.onnx"}
        model["draft"]["session_options"] |= threads["session_options"]
    if job.task.startswith("json-"):
        model["eos_token_id"] = end_token_of(job.target)
    return {"model": model}


if __name__ == "__main__":
    serve(open_job, convert)
