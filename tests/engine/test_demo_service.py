"""Shared engine calls on the shipped pair: the tokens are those of lone runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsbd_ort import Pipeline
from dsbd_ort.engine import Service
from tests.test_demo_pair import PROMPTS

OPTIONS = [
    {"strategy": "dsbd", "num_beams": 2, "width_policy": "fixed", "num_return_sequences": 2},
    {"strategy": "dsbd", "num_beams": 4},
    {"strategy": "speculative"},
    {"strategy": "speculative-beam-search", "num_beams": 3, "num_return_sequences": 3},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options["strategy"])
def test_eight_callers_get_the_tokens_of_lone_runs(
    demo_bundle: Path, options: dict[str, object]
) -> None:
    warped = {} if "search" in str(options["strategy"]) else {"top_k": 20}
    asked = [
        (prompt, {**options, **warped, "seed": seed, "max_new_tokens": 16 + seed % 9})
        for seed, prompt in enumerate(PROMPTS)
    ]
    with Pipeline.from_bundle(demo_bundle, num_threads=1) as pipeline:
        alone = [pipeline.generate(prompt, **given) for prompt, given in asked]
        with Service(pipeline) as service, ThreadPoolExecutor(8) as callers:
            together = list(callers.map(lambda one: service.generate(one[0], **one[1]), asked))
    assert sum(result.stats.target_rows for result in together) > 0
    for one, other in zip(alone, together, strict=True):
        assert [s.token_ids for s in one.sequences] == [s.token_ids for s in other.sequences]
        assert [s.text for s in one.sequences] == [s.text for s in other.sequences]
