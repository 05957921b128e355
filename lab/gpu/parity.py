"""Comparison of a provider with the CPU: tokens of the same seeds, next-token distributions."""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.benchmark.bench_run import PROMPTS
from dsbd_ort.decoding import DecodingConfig, decode
from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.loading import load_causal_lm, load_pair
from dsbd_runtime.text.tokenizer import Tokenizer
from lab.gpu.near_ties import Trace, distributions_along, gap_of, raw_warp, trace_of, variations

WIDTHS = (1, 2, 4)
BEAM_SAMPLE = {"strategy": "beam-sample"}
DSBD = {"strategy": "dsbd", "width_policy": "fixed", "draft_length": 4, "draft_beams": 8}


@dataclass(frozen=True)
class Limits:
    """Differences that rounding in a dtype may cause.

    Attributes:
        gap: largest difference of two scores in a near-tie.
        variation: largest total variation of a next-token distribution.
    """

    gap: float
    variation: float


LIMITS = {"fp32": Limits(1e-3, 1e-3), "fp16": Limits(0.05, 0.02), "bf16": Limits(0.4, 0.15)}


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Result of a comparison.

    Attributes:
        num_compared: number of requests: prompts x widths x 2 (beam-sample, dsbd of fixed width).
        num_identical: number of requests whose best beams are the same to the last token.
        num_near_ties: number of requests whose best beams differ by a gap of at most ``gap_limit``.
        gaps: gaps of all differing requests; None for a token beyond the candidates.
        mean_variation, max_variation: total variation of the target's distributions along the CPU's
            continuations.
        is_within_limits: whether every difference is a near-tie and all distributions are close.
    """

    provider: str
    dtype: str
    num_compared: int
    num_identical: int
    num_near_ties: int
    gap_limit: float
    gaps: list[float | None]
    num_distributions: int
    mean_variation: float
    max_variation: float
    variation_limit: float
    is_within_limits: bool


def compare(bundle: Bundle, provider: str, prompts: Sequence[str], max_new_tokens: int) -> Parity:
    """Run every request on the CPU and on the provider, with the same seeds."""
    tokenizer = Tokenizer.from_bundle(bundle)
    gaps: list[float] = []
    distances = []
    num_compared = 0
    with load_causal_lm(bundle, "target") as reference:
        target, draft = load_pair(bundle, provider=provider)
        with target, draft:
            for seed, text in enumerate(prompts):
                prompt = tokenizer.encode(text)
                for width in WIDTHS:
                    config = _config(BEAM_SAMPLE, width, max_new_tokens, reference)
                    trace = trace_of(reference, prompt, config, seed)
                    others = _best_beams(target, draft, prompt, config, seed)
                    num_compared += len(others)
                    gaps += _gaps(reference, prompt, config, seed, trace, others)
                distances.append(_distances(reference, target, [*prompt, *trace.best]))
    return _parity(bundle, provider, num_compared, gaps, np.concatenate(distances))


def _config(
    strategy: Mapping[str, Any], width: int, max_new_tokens: int, model: CausalLM
) -> DecodingConfig:
    return DecodingConfig(
        **strategy,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_new_tokens,
        top_k=model.spec.head.num_top_logits,
    )


def _best_beams(
    target: CausalLM, draft: CausalLM, prompt: list[int], config: DecodingConfig, seed: int
) -> list[tuple[int, ...]]:
    """Return the best beams of beam sampling, and of DSBD with the same distribution."""
    drafting = _config(DSBD, config.num_beams, config.max_new_tokens, target)
    beams = []
    for each in (config, drafting):
        result = decode(target, draft, prompt, each, np.random.default_rng(seed))
        beams.append(tuple(result.sequences[0].token_ids))
    return beams


def _gaps(
    reference: CausalLM,
    prompt: list[int],
    config: DecodingConfig,
    seed: int,
    trace: Trace,
    others: Sequence[tuple[int, ...]],
) -> list[float]:
    """Return a gap for each beam that differs from the reference's."""
    return [
        gap_of(reference, prompt, config, seed, trace, other)
        for other in others
        if other != trace.best
    ]


def _distances(reference: CausalLM, target: CausalLM, path: list[int]) -> NDArray[np.float64]:
    distributions = [
        distributions_along(model, path, raw_warp(model)) for model in (reference, target)
    ]
    return variations(*distributions)


def _parity(
    bundle: Bundle,
    provider: str,
    num_compared: int,
    gaps: list[float],
    distances: NDArray[np.float64],
) -> Parity:
    dtype = bundle.entry("target").dtype
    limits = LIMITS[dtype]
    num_near_ties = sum(gap <= limits.gap for gap in gaps)
    largest = float(distances.max())
    return Parity(
        provider=provider,
        dtype=dtype,
        num_compared=num_compared,
        num_identical=num_compared - len(gaps),
        num_near_ties=num_near_ties,
        gap_limit=limits.gap,
        gaps=[gap if np.isfinite(gap) else None for gap in gaps],
        num_distributions=len(distances),
        mean_variation=float(distances.mean()),
        max_variation=largest,
        variation_limit=limits.variation,
        is_within_limits=num_near_ties == len(gaps) and largest <= limits.variation,
    )


def main() -> None:
    """Print the result and write it to ``--json``; exceeding the limits is not a failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--provider", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    result = compare(
        open_bundle(options.bundle),
        options.provider,
        PROMPTS[: options.num_prompts],
        options.max_new_tokens,
    )
    text = json.dumps(dataclasses.asdict(result), indent=1)
    print(text)
    options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
