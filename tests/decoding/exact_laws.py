"""Exact laws: of beam sampling, by recursion; of code that draws, by enumeration; a test of fit."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chisquare

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


Outcome = TypeVar("Outcome", bound=Hashable)


class ScriptedChance:
    """Takes the branches of a script, then always the first; remembers all that it met."""

    def __init__(self, script: list[int]) -> None:
        self._script = script
        self.branches: list[list[tuple[int, float]]] = []  # per decision: (value, probability)
        self.taken: list[int] = []

    def happens(self, probability: float) -> bool:
        return bool(self._decide([(1, probability), (0, 1.0 - probability)]))

    def draw(self, probabilities: NDArray[np.float64]) -> int:
        return self._decide(list(enumerate(probabilities.tolist())))

    def draw_distinct(
        self, probabilities: NDArray[np.float64], num_draws: int
    ) -> NDArray[np.int64]:
        left, drawn = probabilities.copy(), []
        while len(drawn) < num_draws and left.any():
            drawn.append(self.draw(left / left.sum()))
            left[drawn[-1]] = 0.0
        return np.array(drawn, dtype=np.int64)

    def _decide(self, branches: list[tuple[int, float]]) -> int:
        possible = [(value, p) for value, p in branches if p > 0.0]
        depth = len(self.taken)
        choice = self._script[depth] if depth < len(self._script) else 0
        self.branches.append(possible)
        self.taken.append(choice)
        return possible[choice][0]

    def probability(self) -> float:
        """Probability of the walk."""
        pairs = zip(self.branches, self.taken, strict=True)
        return float(np.prod([branches[choice][1] for branches, choice in pairs]))


def law_of(run: Callable[[ScriptedChance], Outcome]) -> dict[Outcome, float]:
    """Return the probability of every outcome of ``run``, which must draw by its argument alone."""
    law: dict[Outcome, float] = defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        chance = ScriptedChance(script)
        law[run(chance)] += chance.probability()
        script = _next_script(chance)
    return dict(law)


def _next_script(chance: ScriptedChance) -> list[int] | None:
    script = list(chance.taken)
    while script:
        if script[-1] + 1 < len(chance.branches[len(script) - 1]):
            script[-1] += 1
            return script
        script.pop()
    return None


def total_variation(first: dict[Outcome, float], second: dict[Outcome, float]) -> float:
    """Return half the sum of absolute differences."""
    outcomes = set(first) | set(second)
    return 0.5 * sum(abs(first.get(o, 0.0) - second.get(o, 0.0)) for o in outcomes)


Outcome = TypeVar("Outcome", bound=Hashable)


def chi_square_p_value(
    counts: Counter[Outcome], law: Mapping[Outcome, float], num_runs: int
) -> float:
    """Return the p-value; outcomes expected fewer than five times are pooled."""
    common = [outcome for outcome, p in law.items() if p * num_runs >= 5]
    expected = [law[outcome] * num_runs for outcome in common]
    observed = [counts[outcome] for outcome in common]
    rare = num_runs - sum(expected)
    if rare > 1e-6 * num_runs:
        expected.append(rare)
        observed.append(num_runs - sum(observed))
    scale = num_runs / sum(expected)
    return float(chisquare(observed, np.array(expected) * scale).pvalue)
