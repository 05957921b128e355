"""What the loop asks of an engine: it says which call it needs, whoever drives it has it made.

So one request can have its calls made at once, and several requests can share them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.meter import Meter
from dsbd_ort.decoding.step_model import Candidates, StepModel, candidate_model

EngineOutputs = NDArray[np.float32] | Candidates
"""What StepModel.step returns or, of a model that returns candidates, step_candidates."""


Step = Callable[
    [NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]], EngineOutputs
]
"""StepModel.step, or what a model that returns candidates has instead."""


def step_of(model: StepModel) -> Step:
    """Return the method that appends rows to a model."""
    with_candidates = candidate_model(model)
    return with_candidates.step_candidates if with_candidates else model.step


@dataclass(eq=False, slots=True)
class EngineCall:
    """One call that a request needs before it can go on.

    Attributes:
        model: the engine, or the request's share of it.
        step: ``step_of(model)``.
        meter: of the request, for this engine.
        token_ids, positions, mask, logit_rows: the arguments of ``step``.
    """

    model: StepModel
    step: Step
    meter: Meter
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    mask: NDArray[np.bool_]
    logit_rows: NDArray[np.int64]

    @property
    def is_prefill(self) -> bool:
        """Whether it computes a piece of the prompt: nothing is asked about its rows."""
        return not len(self.logit_rows)

    def run(self) -> EngineOutputs:
        """Have the model make the call, for this request alone."""
        meter = self.meter
        began = meter.clock()
        outputs = self.step(self.token_ids, self.positions, self.mask, self.logit_rows)
        meter.count(len(self.token_ids), meter.clock() - began)
        return outputs


Result = TypeVar("Result")
EngineCalls = Generator[EngineCall, EngineOutputs, Result]
"""What needs engine calls on its way to a result: each is answered by its outputs."""
