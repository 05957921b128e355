"""Forecast of a pair: tokens an iteration, and the speed-up that follows from measured calls.

Requests are decoded for real, with the drafts that "throughput" would make. Their engine calls are
not timed, but priced by cost curves that are measured before, each with its number of rows, so that
a disturbance of the machine does not spoil what takes seconds. Prompts, the host and what
attention costs at long contexts are left out; dsbd-bench measures all of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding import DecodingConfig, StepModel, decode_iterations, result_of
from dsbd_ort.decoding.drafting.cost_curve import CostCurve, EngineCosts, measure_costs
from dsbd_ort.decoding.drafting.throughput import AcceptanceEstimator
from dsbd_ort.decoding.step_model import Logits
from dsbd_runtime.bundle import Bundle
from dsbd_runtime.draft_record import ExpectedSpeed
from dsbd_runtime.loading import load_pair

WIDTHS = (1, 2, 4)
TOP_K = 20
_NUM_PROMPTS, _NEW_TOKENS = 16, 32


class PricedModel:
    """A StepModel that counts the rows of its calls; see StepModel."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self.vocab_size = model.vocab_size
        self.rows_by_call: list[int] = []

    @property
    def num_rows(self) -> int:
        """See StepModel."""
        return self._model.num_rows

    def keep(self, rows: NDArray[np.int64]) -> None:
        """See StepModel.keep."""
        self._model.keep(rows)

    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
    ) -> Logits:
        """See StepModel.forward."""
        self.rows_by_call.append(len(token_ids))
        return self._model.forward(token_ids, positions, mask, logit_rows)

    def seconds(self, curve: CostCurve) -> float:
        """Return the price of the calls since the last time, the first left out: the prompt's."""
        rows, self.rows_by_call = np.array(self.rows_by_call[1:], dtype=np.int64), []
        return float(curve.up_to(rows.max(initial=0))[rows].sum())


def forecast(bundle: Bundle, prompts: Sequence[Sequence[int]]) -> list[ExpectedSpeed]:
    """Return what to expect of a bundle's draft at each of ``WIDTHS``, on the CPU.

    prompts: token ids, of which some are continued.
    """
    room = bundle.context_length - max(map(len, prompts))
    with ExitStack() as stack:
        target, draft = load_pair(bundle)
        for model in (target, draft):
            stack.enter_context(model)
        costs = measure_costs(target, draft, time.perf_counter)
        chosen, new_tokens = prompts[:_NUM_PROMPTS], min(_NEW_TOKENS, room)
        return list(forecasts(target, draft, costs, chosen, new_tokens))


def forecasts(
    target: StepModel,
    draft: StepModel,
    costs: EngineCosts,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
) -> Iterator[ExpectedSpeed]:
    """Yield the forecast of each width for engines with these costs."""
    models = PricedModel(target), PricedModel(draft)
    for width in WIDTHS:
        config = DecodingConfig(
            strategy="speculative" if width == 1 else "dsbd",
            num_beams=width,
            top_k=min(TOP_K, target.vocab_size),
            max_new_tokens=new_tokens,
            draft_policy="throughput",
        )
        estimator = AcceptanceEstimator.initial()
        num_iterations, num_layers, seconds = 0, 0, 0.0
        for seed, prompt in enumerate(prompts):
            iterations = decode_iterations(
                *models, prompt, config, np.random.default_rng(seed), costs=costs,
                estimator=estimator,
            )  # fmt: skip
            stats = result_of(iterations).stats
            num_iterations += stats.num_iterations
            num_layers += stats.num_iterations + stats.num_accepted_layers
            curves = costs.target, costs.draft
            seconds += sum(m.seconds(c) for m, c in zip(models, curves, strict=True))
        plain = num_layers * float(costs.target.up_to(width)[width])
        yield ExpectedSpeed(
            num_beams=width,
            tokens_per_iteration=num_layers / num_iterations,
            speedup=plain / seconds,
        )
