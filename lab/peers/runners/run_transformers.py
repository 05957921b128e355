"""transformers: generate() in fp32; schemas by a logits processor with llguidance."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, PreTrainedModel

from lab.peers.runners.serve import (
    Answered,
    Asked,
    Job,
    Opened,
    end_token_of,
    serve,
    unknown_task,
)

SEARCHED = {"return_dict_in_generate": True, "output_scores": True}  # to get the sequences' scores
BEAM_SEARCH: dict[str, Any] = {"do_sample": False, "early_stopping": False, "length_penalty": 1.0}
OPTIONS_BY_TASK: dict[str, dict[str, Any]] = {
    "beam-search": BEAM_SEARCH,
    "beam-sampling": {"do_sample": True},
    "assisted": {"do_sample": True},
    "sampling": {"do_sample": True},
    "retrieval": BEAM_SEARCH,
    "json-beam-search": BEAM_SEARCH,
    "json-sampling": {"do_sample": True},
}


def open_job(job: Job) -> Opened:
    """Load the checkpoints and return generate() for the task."""
    if job.precision != "fp32" or job.task not in OPTIONS_BY_TASK:
        raise unknown_task(job)
    torch.set_num_threads(job.num_threads)
    target = _model(job.target)
    assistant = {"assistant_model": _model(job.draft)} if job.task == "assisted" else {}
    options = OPTIONS_BY_TASK[job.task] | job.options
    schemas = Schemas(job) if job.task.startswith("json-") else None
    if schemas:
        options["eos_token_id"] = schemas.end_token

    @torch.inference_mode()
    def generate(asked: Asked) -> Answered:
        torch.manual_seed(asked.seed)
        prompt = torch.tensor([asked.prompt_ids])
        # the config has no end token, so every sequence has the full length
        config = GenerationConfig(max_new_tokens=asked.max_new_tokens, pad_token_id=0, **options)
        more: dict[str, Any] = dict(assistant)
        if schemas and asked.json_schema is not None:
            more["logits_processor"] = [schemas.processor(asked)]
        if asked.ids_file is not None:
            more |= SEARCHED | {"prefix_allowed_tokens_fn": _allowed(asked)}
        output = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=config,
            **more,
        )
        if asked.ids_file is not None:
            sequences = output.sequences[:, len(asked.prompt_ids) :].tolist()
            return Answered(sequences[0], None, sequences, output.sequences_scores.tolist())
        new_tokens: list[int] = output[0, len(asked.prompt_ids) :].tolist()
        return Answered(new_tokens)

    settings = f"{target.dtype}, attention {target.config._attn_implementation}"
    if schemas:
        settings += f", llguidance {schemas.version}"
    return Opened(version=transformers.__version__, settings=settings, generate=generate)


def _model(folder: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)  # the checkpoint's has an end token
    return model


def _allowed(asked: Asked) -> Callable[[int, torch.Tensor], list[int]]:
    """Return a function for transformers that returns the allowed next tokens of a path."""
    assert asked.ids_file is not None  # a retrieval task
    followers, start = _followers(asked.ids_file), len(asked.prompt_ids)
    return lambda _, token_ids: followers[tuple(token_ids[start:].tolist())]


@functools.cache
def _followers(ids_file: str) -> dict[tuple[int, ...], list[int]]:
    """Return the tokens that follow each prefix of an id."""
    tokens_by_prefix: dict[tuple[int, ...], set[int]] = {}
    for sequence in np.load(ids_file).tolist():
        for place, token in enumerate(sequence):
            tokens_by_prefix.setdefault(tuple(sequence[:place]), set()).add(token)
    return {prefix: sorted(tokens) for prefix, tokens in tokens_by_prefix.items()}


class Schemas:
    """llguidance with the tokenizer of the checkpoints."""

    def __init__(self, job: Job) -> None:
        import llguidance  # only installed for the comparison of schemas

        self._library = llguidance
        self.version = llguidance._lib.get_version()
        self.end_token = end_token_of(job.target)
        text = (Path(job.target) / "tokenizer.json").read_text()
        self._tokenizer = llguidance.LLTokenizer(text, eos_token=self.end_token)

    def processor(self, asked: Asked) -> SchemaProcessor:
        """Return the processor of a request."""
        assert asked.json_schema is not None
        matcher = self._library.LLMatcher
        root = matcher(self._tokenizer, matcher.grammar_from_json_schema(asked.json_schema))
        if root.is_error():
            raise ValueError(root.get_error())
        return SchemaProcessor(root, len(asked.prompt_ids), self.end_token)


class SchemaProcessor(LogitsProcessor):  # type: ignore[misc]  # transformers has no types
    """Keeps a matcher for every path, because a beam may continue any path of the last step."""

    def __init__(self, root: Any, prompt_length: int, end_token: int) -> None:
        self._matchers: dict[tuple[int, ...], Any] = {(): root}
        self._prompt_length = prompt_length
        self._end_token = end_token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return (num_rows, vocab) scores, -inf where the schema forbids the token."""
        paths = [tuple(row) for row in input_ids[:, self._prompt_length :].tolist()]
        open_paths = {path for path in paths if self._end_token not in path}
        self._matchers = {path: self._matcher(path) for path in open_paths}
        is_allowed = np.ones(scores.shape, dtype=bool)
        for row, path in enumerate(paths):
            if path in open_paths:
                mask = np.frombuffer(self._matchers[path].compute_bitmask(), dtype=np.uint8)
                is_allowed[row] = np.unpackbits(mask, bitorder="little")[: scores.shape[1]]
        return scores.masked_fill(torch.from_numpy(~is_allowed), -torch.inf)

    def _matcher(self, path: tuple[int, ...]) -> Any:
        if not path:
            return self._matchers[path]
        matcher = self._matchers[path[:-1]].deep_copy()
        if not matcher.consume_token(path[-1]):
            raise ValueError(f"the schema forbids {path}: {matcher.get_error()}")
        return matcher


if __name__ == "__main__":
    serve(open_job)
