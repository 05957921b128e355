"""How much to draft: the seam between the loop and its drafting policies (ALGORITHM.md 3.5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.joint_law import JointLaw

Propose = Callable[[JointLaw, int, int], NDArray[np.int64]]
"""(law, num_draws, step) -> the draft's candidates in the order drawn."""

Scores = Callable[[JointLaw, int], NDArray[np.float64]]
"""(law, step) -> (num_candidates,) float64: by these a rule ranks candidates."""


class Drafting(Protocol):
    """Decides, layer by layer, whether the draft goes on and with how many candidates."""

    def begin(self, num_pending: int, most_layers: int) -> None:
        """Start an iteration.

        Args:
            num_pending: rows the target must compute whatever is drafted.
            most_layers: layers that can still be used.
        """

    def wants_layer(self, num_rows: int) -> bool:
        """Tell whether to ask the draft for one more layer, a call of ``num_rows`` rows."""

    def choose(self, law: JointLaw, step: int) -> NDArray[np.int64]:
        """Return the candidates of the draft's ``law`` to add, best first; none ends the draft."""

    def observe(self, forest: Forest, committed: list[list[int]]) -> None:
        """Learn from an iteration: the selected nodes of every committed layer."""


class FixedDrafting:
    """``draft_length`` layers of ``draft_beams`` candidates each."""

    def __init__(self, layer_widths: tuple[int, ...], propose: Propose) -> None:
        self._layer_widths = layer_widths
        self._propose = propose
        self._layer = 0
        self._num_layers = 0

    def begin(self, num_pending: int, most_layers: int) -> None:
        """See Drafting.begin."""
        self._layer, self._num_layers = 0, min(len(self._layer_widths), most_layers)

    def wants_layer(self, num_rows: int) -> bool:
        """See Drafting.wants_layer."""
        return self._layer < self._num_layers

    def choose(self, law: JointLaw, step: int) -> NDArray[np.int64]:
        """See Drafting.choose."""
        drawn = self._propose(law, self._layer_widths[self._layer], step)
        self._layer += 1
        return drawn

    def observe(self, forest: Forest, committed: list[list[int]]) -> None:
        """Nothing is learned: the numbers are given."""
