"""The exact law of beam sampling (docs/algorithm.md 2) by recursion, written on its own."""

import math
from collections import defaultdict

import numpy as np

from tests.decoding.tables import LogitsOf

Path = tuple[int, ...]
BeamSet = tuple[tuple[Path, float], ...]  # (new tokens, log weight) in the order drawn


def token_probs(table: LogitsOf, path: Path) -> list[float]:
    logits = np.asarray(table(path))
    if not getattr(table, "is_processed", False):  # as an engine returns them
        logits = logits.astype(np.float32).astype(np.float64)
    weights = np.exp(logits - logits.max())
    return list(weights / weights.sum())


def next_beam_sets(
    table: LogitsOf, prompt: Path, beams: BeamSet, width: int, eos: int, replacement: bool
) -> dict[BeamSet, float]:
    """All ordered outcomes of one step and their probabilities."""
    candidates: list[tuple[Path, float]] = []
    for tokens, log_weight in beams:
        if tokens and tokens[-1] == eos:
            candidates.append((tokens, log_weight))
            continue
        for token, p in enumerate(token_probs(table, prompt + tokens)):
            if p > 0:
                candidates.append(((*tokens, token), log_weight + math.log(p)))
    outcomes: dict[BeamSet, float] = {}

    def draw(chosen: BeamSet, rest: list[tuple[Path, float]], probability: float) -> None:
        if len(chosen) == width or not rest:
            outcomes[chosen] = outcomes.get(chosen, 0.0) + probability
            return
        total = sum(math.exp(weight) for _, weight in rest)
        for i, candidate in enumerate(rest):
            share = math.exp(candidate[1]) / total
            left = rest if replacement else rest[:i] + rest[i + 1 :]
            draw((*chosen, candidate), left, probability * share)

    draw((), candidates, 1.0)
    return outcomes


def beam_sampling_law(
    table: LogitsOf,
    prompt: Path,
    width: int,
    num_steps: int,
    eos: int = -1,
    replacement: bool = False,
) -> dict[tuple[Path, ...], float]:
    """Probability of every final multiset of beams (new tokens, sorted) after ``num_steps``."""
    law: dict[BeamSet, float] = {(((), 0.0),): 1.0}
    for _ in range(num_steps):
        following: dict[BeamSet, float] = defaultdict(float)
        for beams, probability in law.items():
            for outcome, share in next_beam_sets(
                table, prompt, beams, width, eos, replacement
            ).items():
                following[outcome] += probability * share
        law = following
    merged: dict[tuple[Path, ...], float] = defaultdict(float)
    for beams, probability in law.items():
        merged[tuple(sorted(tokens for tokens, _ in beams))] += probability
    return dict(merged)
