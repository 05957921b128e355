"""Requests of every strategy, and what Pipeline answers to them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dsbd_ort import GenerationResult, Pipeline

TEXTS = ["def read(", "a", "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN}", "x = [1, 2", "  "]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_beams": 2, "width_policy": "fixed"},
    {"num_beams": 3, "num_return_sequences": 2, "min_beams": 2},
    {"strategy": "beam-sample", "num_beams": 2},
    {"strategy": "speculative", "draft_length": 3},
    {"strategy": "tree-speculative"},
    {"strategy": "sample", "temperature": 0.7, "top_k": 5},
    {"strategy": "beam-search", "num_beams": 2},
    {"strategy": "speculative-beam-search", "length_penalty": 0.5},
    {"strategy": "greedy"},
    {"strategy": "mjsd"},
    {"constraint": {"regex": "[a-d]{2,6}"}, "num_beams": 3},
    {"constraint": {"json_schema": {"enum": ["no", [1, 2]]}}, "strategy": "sample"},
    {"coupling": "rejection", "stop_strings": ["e", "\n"]},
]
IDS = [[1, 2, 3], [250]]


@dataclass(frozen=True)
class Asked:
    """One request, by text or by token ids."""

    prompt: str | list[int]
    options: dict[str, Any]

    @property
    def line(self) -> str:
        """The request for ask.c."""
        is_text = isinstance(self.prompt, str)
        prompt = self.prompt if is_text else " ".join(map(str, self.prompt))
        return "\t".join(["text" if is_text else "ids", prompt, json.dumps(self.options)])


def requests() -> list[Asked]:
    """Return every beginning with every set of options, each with another end and another seed."""
    pairs = [(prompt, options) for prompt in [*TEXTS, *IDS] for options in OPTIONS]
    return [
        Asked(
            f"{prompt}{seed}" if isinstance(prompt, str) else [*prompt, seed],
            {"max_new_tokens": 8, "seed": seed, **options},
        )
        for seed, (prompt, options) in enumerate(pairs)
    ]


def answers(pipeline: Pipeline, asked: list[Asked]) -> list[GenerationResult]:
    """Return what lone requests get."""
    return [pipeline.generate(request.prompt, **request.options) for request in asked]
