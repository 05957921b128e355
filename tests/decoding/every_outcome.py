"""Walk through every outcome of code that draws by ``Chance``: exact laws by enumeration."""

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

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
