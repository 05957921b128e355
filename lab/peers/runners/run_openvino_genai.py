"""OpenVINO GenAI: beam search, drafting and schemas, on models exported by optimum-intel."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from lab.peers.runners.serve import (
    Answered,
    Asked,
    Job,
    Opened,
    end_token_of,
    serve,
    unknown_task,
)

DEVICE = "CPU"
ROLES = ("target", "draft")
# int8 keeps the plugin's defaults, as users of the tool would
PROPERTIES_BY_PRECISION = {
    "fp32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "int8": {},
}
REPORTED = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_p": 1.0}
BEAM_SEARCH: dict[str, Any] = {
    "do_sample": False,
    "length_penalty": 1.0,
    "stop_criteria": openvino_genai.StopCriteria.HEURISTIC,  # early_stopping=False
}
OPTIONS_BY_TASK: dict[str, dict[str, Any]] = {
    "beam-search": BEAM_SEARCH,
    "assisted": SAMPLING,
    "sampling": SAMPLING,
    "retrieval": BEAM_SEARCH,
    "json-beam-search": BEAM_SEARCH,
    "json-sampling": SAMPLING,
}


def convert(job: Job) -> None:
    """Export both models; int8 is optimum-intel's --weight-format int8."""
    for role in ROLES:
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
        command += ["--model", getattr(job, role), "--task", "text-generation-with-past"]
        command += ["--weight-format", job.precision, str(Path(job.folder) / role)]
        subprocess.run(command, check=True)


def open_job(job: Job) -> Opened:
    """Open the exported models."""
    if job.task not in OPTIONS_BY_TASK:
        raise unknown_task(job)
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": job.num_threads}
    properties |= PROPERTIES_BY_PRECISION[job.precision]
    target, draft = (str(Path(job.folder) / role) for role in ROLES)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # with a draft model it fails in fp32 (2026.4.1)
    parts: dict[str, Any] = {"scheduler_config": scheduler}
    if job.task == "assisted":
        parts["draft_model"] = openvino_genai.draft_model(draft, DEVICE, **properties)
    pipeline = openvino_genai.LLMPipeline(target, DEVICE, **properties, **parts)

    def generate(asked: Asked) -> Answered:
        config = _config(OPTIONS_BY_TASK[job.task] | job.options, asked)
        if asked.json_schema is not None:
            config.ignore_eos, config.eos_token_id = False, end_token_of(job.target)
            config.stop_token_ids = {end_token_of(job.target)}
        ids = np.array([asked.prompt_ids], dtype=np.int64)  # (1, prompt_length)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        )
        result = pipeline.generate(inputs, config)
        num_iterations = len(result.perf_metrics.raw_metrics.m_batch_sizes)
        if job.task == "retrieval":
            return Answered(result.tokens[0], num_iterations, result.tokens, result.scores)
        return Answered(result.tokens[0], num_iterations)

    return Opened(
        version=openvino_genai.get_version().partition("-")[0],
        settings=_in_effect(draft, properties) + ", prefix caching off",
        generate=generate,
    )


def _config(options: dict[str, Any], asked: Asked) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = asked.max_new_tokens
    config.ignore_eos = True
    config.rng_seed = asked.seed
    if asked.json_schema is not None:
        config.structured_output_config = openvino_genai.StructuredOutputConfig(
            json_schema=asked.json_schema
        )
    for name, value in options.items():
        if not hasattr(config, name):
            raise ValueError(f"GenerationConfig of OpenVINO GenAI has no {name!r}")
        setattr(config, name, value)
    return config


def _in_effect(draft: str, properties: dict[str, Any]) -> str:
    """Return the properties in effect, read from the draft to save memory."""
    model = str(Path(draft) / "openvino_model.xml")
    compiled = openvino.Core().compile_model(model, DEVICE, properties)
    values = {name: compiled.get_property(name) for name in REPORTED}
    return ", ".join(
        f"{name} {value.to_string() if isinstance(value, openvino.Type) else value}"
        for name, value in values.items()
    )


if __name__ == "__main__":
    serve(open_job, convert)
