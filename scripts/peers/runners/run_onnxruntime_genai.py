"""onnxruntime-genai: beam search and its speculative mode, on models of its own builder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime_genai

from peers.runners.serve import Job, Opened, serve, unknown_task

CONFIG = "genai_config.json"
ROLES = ("target", "draft")
OPTIONS_BY_TASK: dict[str, dict[str, Any]] = {
    "beam-search": {"do_sample": False, "early_stopping": False, "length_penalty": 1.0},
    "assisted": {"do_sample": True, "temperature": 1.0, "top_p": 1.0},
    "sampling": {"do_sample": True, "temperature": 1.0, "top_p": 1.0},
}


def convert(job: Job) -> None:
    """Build both models below one folder: a configuration may not point outside of its own."""
    folder = Path(job.folder)
    for role in ROLES:
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-e", "cpu"]
        command += ["-i", getattr(job, role), "-p", job.precision]
        command += ["-o", str(folder / role), "-c", str(folder / "cache")]
        subprocess.run(command, check=True)
    config = json.loads((folder / "target" / CONFIG).read_text())
    # no end token can be switched off, but the begin token is never generated
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

    def generate(prompt_ids: list[int], max_new_tokens: int, seed: int) -> list[int]:
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(
            max_length=len(prompt_ids) + max_new_tokens,
            random_seed=seed,
            **OPTIONS_BY_TASK[job.task] | job.options,
        )
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(prompt_ids)
        while not generator.is_done():
            generator.generate_next_token()
        new_tokens: list[int] = generator.get_sequence(0)[len(prompt_ids) :].tolist()
        return new_tokens

    settings = "CPU provider"
    if job.precision == "int8":
        settings += ", weights as its model builder quantizes them"
    return Opened(version=onnxruntime_genai.__version__, settings=settings, generate=generate)


def _overlay(job: Job) -> dict[str, Any]:
    """Return the job's changes to the configuration that the conversion wrote."""
    threads = {"session_options": {"intra_op_num_threads": job.num_threads}}
    model: dict[str, Any] = {"decoder": threads}
    if job.task == "assisted":
        built = json.loads((Path(job.folder) / "draft" / CONFIG).read_text())
        model["draft"] = built["model"]["decoder"] | {"filename": "draft/model.onnx"}
        model["draft"]["session_options"] |= threads["session_options"]
    return {"model": model}


if __name__ == "__main__":
    serve(open_job, convert)
