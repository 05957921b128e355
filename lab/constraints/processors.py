"""Times of iterations with processors, early and late in a long output, on tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.progress import track

from dsbd_ort.decoding import DecodingConfig, DecodingRequest, decode_iterations
from lab.host_time.bigram_models import DenseBigram, random_pair

VOCAB_SIZE, NUM_BEAMS = 4096, 4
WINDOW = 48  # iterations before each of the depths
PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "`repetition_penalty`": {"repetition_penalty": 1.2},
    "`presence_penalty`, `frequency_penalty`": {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    "`no_repeat_ngram_size`": {"no_repeat_ngram_size": 3},
    "`bad_words_ids`": {"bad_words_ids": [[5], [6, 7], [8, 9, 10]]},
    "`logit_bias`, `suppress_tokens`": {"logit_bias": {5: 1.0}, "suppress_tokens": [6]},
    "`min_p`, `typical_p`": {"min_p": 0.01, "typical_p": 0.95},
    "`min_new_tokens`, `forced_eos_token_id`": {"min_new_tokens": 8000, "forced_eos_token_id": 1},
}


def processor_rows(depths: tuple[int, int], num_rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield a row a set of processors: microseconds of an iteration at both depths, their ratio."""
    target = DenseBigram(random_pair(VOCAB_SIZE, 1.0)[0])
    found: dict[str, list[list[float]]] = {name: [] for name in PROCESSORS}
    for _ in track(range(num_rounds), description="processors", transient=True):
        for name, options in PROCESSORS.items():
            found[name].append(_iteration_us(target, options, depths))
    for name, rounds in found.items():
        early, late = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratio = statistics.median(late / early for early, late in rounds)
        yield name, f"{early:.0f}", f"{late:.0f}", f"{ratio:.2f}"


def _iteration_us(
    target: DenseBigram, options: dict[str, Any], depths: tuple[int, int]
) -> list[float]:
    """Return the median iteration of the window that ends at each depth."""
    config = DecodingConfig(
        strategy="beam-sample",
        num_beams=NUM_BEAMS,
        top_k=50,
        max_new_tokens=max(depths),
        eos_token_id=1,
        **{"min_new_tokens": max(depths), **options},
    )
    target.keep(np.arange(0))
    times = [time.perf_counter()]
    for _ in decode_iterations(
        DecodingRequest(prompt_ids=(2, 3), config=config, rng=np.random.default_rng(0)),
        target,
        None,
    ):
        times.append(time.perf_counter())
    taken = np.diff(times)
    return [1e6 * float(np.median(taken[depth - WINDOW : depth])) for depth in depths]
