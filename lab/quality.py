"""Quality of the demo pair's completions, by strategy.

Prompts are signatures of functions in held-out modules of the running Python's standard library.
Every strategy continues the same prompts with the same seeds. Intervals are 95 % bootstrap
intervals over prompts.
"""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.progress import track

from dsbd_export.texts import is_held_out
from dsbd_ort import GenerationResult, Pipeline
from dsbd_ort.benchmark.bootstrap import bootstrap
from lab.frame.page import BUNDLE, RESULTS, Page, writes
from scripts.demo_pair.corpus import stdlib_sources
from scripts.document_sections import table

COLUMNS = (
    *("strategy", "log-probability per token (nats)", "ended", "parses", "tokens per iteration"),
)
JOINT_COLUMNS = (
    *("strategy", "joint log-probability (nats)", "more than greedy", "tokens per iteration"),
)
TOP_K = 20
COLD = {"temperature": 0.0}
DRAFTED = {"draft_policy": "fixed"}
FIXED = {"width_policy": "fixed", **DRAFTED}

ROWS: dict[str, dict[str, Any]] = {
    "greedy": {"strategy": "greedy"},
    "sample": {"strategy": "sample", "top_k": TOP_K},
    "speculative": {"strategy": "speculative", "top_k": TOP_K, **DRAFTED},
    "beam-sample, W=2": {"strategy": "beam-sample", "num_beams": 2, "top_k": TOP_K},
    "dsbd fixed, W=2": {"num_beams": 2, "top_k": TOP_K, **FIXED},
    "dsbd fixed, W=2, single": {"num_beams": 2, "top_k": TOP_K, "memory": "single", **FIXED},
    "beam-sample, W=4": {"strategy": "beam-sample", "num_beams": 4, "top_k": TOP_K},
    "dsbd fixed, W=4": {"num_beams": 4, "top_k": TOP_K, **FIXED},
    "dsbd fixed, W=4, single": {"num_beams": 4, "top_k": TOP_K, "memory": "single", **FIXED},
    "dsbd threshold, W=4, min_beams=1": {"num_beams": 4, "min_beams": 1, "top_k": TOP_K},
    "dsbd threshold, W=4, min_beams=2": {"num_beams": 4, "min_beams": 2, "top_k": TOP_K},
    "dsbd threshold, W=4, min_beams=3": {"num_beams": 4, "min_beams": 3, "top_k": TOP_K},
    "mjsd, 4 draft beams, temperature 0": {"strategy": "mjsd", **COLD},
    "mjgd, 4 tokens, 4 beams, temperature 0": {"strategy": "mjgd", **COLD},
    "beam-search, W=4": {"strategy": "beam-search", "num_beams": 4},
    "speculative-beam-search, W=4": {
        **{"strategy": "speculative-beam-search", "num_beams": 4, **DRAFTED}
    },
}

JOINT_TOKENS = 32
JOINT_ROWS: dict[str, dict[str, Any]] = {
    "greedy": {"strategy": "greedy"},
    "mjsd, 1 draft beam, threshold 0.1": {"strategy": "mjsd", "draft_beams": 1, **COLD},
    "mjsd, 4 draft beams, threshold 0.1": {"strategy": "mjsd", **COLD},
    "mjsd, 4 draft beams, threshold 0.9": {"strategy": "mjsd", "joint_threshold": 0.9, **COLD},
    "mjgd, 4 tokens, 4 beams": {"strategy": "mjgd", **COLD},
    "mjgd, 8 tokens, 8 beams": {"strategy": "mjgd", "joint_tokens": 8, "joint_beams": 8, **COLD},
}


@dataclass(frozen=True)
class Outcome:
    """One completion; ``does_parse``: prompt + completion is valid Python."""

    logprob_per_token: float
    has_ended: bool
    does_parse: bool
    tokens_per_iteration: float


def held_out_signatures(count: int) -> list[str]:
    """Return signatures of ``count`` functions in held-out modules, drawn at random."""
    signatures = []
    for relative, source in stdlib_sources():
        if not is_held_out(relative):
            continue
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.lineno < node.body[0].lineno:
                header = "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1])
                if header.endswith(":") and len(header) < 120:
                    signatures.append(
                        header
                    )  # without newline, which would split the body's first token
    distinct = sorted(set(signatures))
    order = np.random.default_rng(0).permutation(len(distinct))
    return [distinct[i] for i in order[:count]]


def judge(prompt: str, result: GenerationResult) -> Outcome:
    """Measure the best sequence of a result."""
    best = result.sequences[0]
    try:
        ast.parse(prompt + best.text)
        does_parse = True
    except (SyntaxError, ValueError):
        does_parse = False
    per_token = best.logprob / len(best.token_ids)
    has_ended = best.finish_reason == "eos"
    return Outcome(per_token, has_ended, does_parse, result.stats.mean_acceptance_length)


def interval(values: list[float]) -> str:
    """Return the mean and its 95 % bootstrap interval over prompts."""
    estimate = bootstrap(values, "mean")
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


def table_row(name: str, outcomes: list[Outcome]) -> tuple[str, ...]:
    """Return the row of a strategy."""
    logprob = interval([o.logprob_per_token for o in outcomes])
    parses = interval([float(o.does_parse) for o in outcomes])
    pace = np.mean([o.tokens_per_iteration for o in outcomes])
    ended = np.mean([o.has_ended for o in outcomes])
    return name, logprob, f"{ended:.2f}", parses, f"{pace:.2f}"


def quality_table(pipeline: Pipeline, prompts: list[str], max_new_tokens: int) -> list[str]:
    """Return the table of all strategies."""
    rows = []
    for name, options in track(ROWS.items(), description="strategies"):
        results = [
            pipeline.generate(prompt, seed=seed, max_new_tokens=max_new_tokens, **options)
            for seed, prompt in enumerate(prompts)
        ]
        rows.append(table_row(name, [judge(p, r) for p, r in zip(prompts, results, strict=True)]))
    return [
        f"{len(prompts)} prompts, {max_new_tokens} new tokens at most, top-k {TOP_K} where a "
        f"strategy samples, Python {sys.version.split()[0]}.",
        "",
        *table(COLUMNS, rows),
    ]


def joint_table(pipeline: Pipeline, prompts: list[str]) -> list[str]:
    """Return the table of joint log-probabilities of a fixed number of tokens."""
    rows = []
    by_greedy: list[float] = []
    for name, options in track(JOINT_ROWS.items(), description="joint"):
        results = [
            pipeline.generate(prompt, max_new_tokens=JOINT_TOKENS, eos_token_id=(), **options)
            for prompt in prompts
        ]
        logprobs = [result.sequences[0].logprob for result in results]
        by_greedy = by_greedy or logprobs  # the first row
        gain = [logprob - greedy for logprob, greedy in zip(logprobs, by_greedy, strict=True)]
        pace = np.mean([result.stats.mean_acceptance_length for result in results])
        rows.append((name, interval(logprobs), interval(gain), f"{pace:.2f}"))
    return [
        f"Joint log-probability of exactly {JOINT_TOKENS} tokens (no end of sequence, temperature "
        "0), and its paired difference to greedy:",
        "",
        *table(JOINT_COLUMNS, rows),
    ]


@click.command(help=__doc__)
@BUNDLE
@click.option("--prompts", default=100, show_default=True)
@click.option("--max-new-tokens", default=64, show_default=True)
@writes(RESULTS / "quality.md", is_timed=False)
def main(bundle: Path, prompts: int, max_new_tokens: int, page: Page) -> None:
    """Measure every row and write the tables into the page."""
    page.begin("measured")
    signatures = held_out_signatures(prompts)
    with Pipeline.from_bundle(bundle, num_threads=page.threads) as pipeline:
        lines = quality_table(pipeline, signatures, max_new_tokens)
        lines += ["", *joint_table(pipeline, signatures)]
    page.write("measured", lines, f"`{bundle.name}`")
