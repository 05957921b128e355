"""What it saves to draft forced tokens without the model: JSON by real engines, with and without.

"Without" lets the draft model draft everything, as it does where no constraint is given.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import track

from dsbd_ort import JsonSchema, Pipeline
from dsbd_ort.benchmark.bootstrap import spread
from dsbd_ort.decoding import DecodingStats
from dsbd_ort.decoding.drafting.drafters import ChainedDrafter
from lab.frame.page import ratio_cell

FORCED_COLUMNS = (
    "beams",
    "forced drafted",
    "tokens",
    "iterations",
    "draft calls",
    "target rows",
    "ms a request",
    "times as fast",
)
PROMPT = "def settings():\n    return "
KEYS = ("identifier", "display_name", "description", "enabled", "retries", "timeout_seconds")
VALUES: tuple[dict[str, Any], ...] = (
    {"type": "integer", "minimum": 0, "maximum": 9999},
    {"type": "string", "maxLength": 10},
    {"type": "boolean"},
    {"enum": ["low", "medium", "high"]},
)


def schema_of(number: int) -> dict[str, Any]:
    """Return one of many schemas of the usual kind: an object with some required properties."""
    names = [KEYS[(number + i) % len(KEYS)] for i in range(3 + number % 3)]
    properties = {name: VALUES[(number + i) % len(VALUES)] for i, name in enumerate(names)}
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


@contextmanager
def by_the_model_alone() -> Iterator[None]:
    """Let nobody but the draft model draft meanwhile."""
    ask = ChainedDrafter._ask_constraint  # there is no option for it
    ChainedDrafter._ask_constraint = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        ChainedDrafter._ask_constraint = ask  # type: ignore[method-assign]


def forced_rows(bundle: Path, num_requests: int, threads: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table: means over the requests, and the median ratio of their times."""
    with Pipeline.from_bundle(bundle, num_threads=threads) as pipeline:
        for beams in (1, 4):

            def decoded(number: int, beams: int = beams) -> tuple[str, DecodingStats]:
                result = pipeline.generate(
                    PROMPT,
                    num_beams=beams,
                    constraint=JsonSchema(schema_of(number)),
                    max_new_tokens=160,
                    seed=number,
                )
                return result.sequences[0].text, result.stats

            found: dict[str, list[DecodingStats]] = {"yes": [], "no": []}
            ratios = []
            requests = range(-2, num_requests)  # two that only warm up
            for number in track(requests, description=f"forced tokens, W={beams}", transient=True):
                with_forced, stats = decoded(abs(number))
                with by_the_model_alone():
                    without, plain_stats = decoded(abs(number))
                assert with_forced == without, "what drafts shows in the output"
                json.loads(with_forced)
                if number >= 0:
                    found["yes"].append(stats)
                    found["no"].append(plain_stats)
                    ratios.append(seconds_of(plain_stats) / seconds_of(stats))
            for name, stats_of in found.items():
                ratio = ratio_cell(spread(ratios)) if name == "yes" else "1"
                yield str(beams), name, *_means(stats_of), ratio


def seconds_of(stats: DecodingStats) -> float:
    """Return the seconds of a whole request."""
    return stats.target_s + stats.draft_s + stats.host_s


def _means(found: list[DecodingStats]) -> Iterator[str]:
    for count in ("num_output_tokens", "num_iterations", "draft_calls", "target_rows"):
        yield f"{statistics.fmean(getattr(stats, count) for stats in found):.1f}"
    yield f"{1e3 * statistics.fmean(map(seconds_of, found)):.0f}"
