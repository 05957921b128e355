"""Forecast for a pair: tokens per iteration, and the speed-up that follows from measured costs.

The engine calls of the requests are not timed. Each call is priced by its number of rows, with cost
curves measured before. Prompts, the host and the cost of attention at long contexts are left out;
dsbd-bench measures all of it.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from dsbd_forward.forward import Source
from dsbd_ort.benchmark.bench_run import BenchmarkError
from dsbd_ort.decoding import (
    DecodingConfig,
    DecodingRequest,
    StepModel,
    decode_iterations,
    result_of,
)
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import (
    MEASURED_ROWS,
    CostKind,
    EngineCosts,
    measure_costs,
)
from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.bundle_files.draft_record import ExpectedSpeed
from dsbd_runtime.loading import load_pair

WIDTHS = (1, 2, 4)
GREEDY_WIDTHS = (1, 4)
TOP_K = 20  # for texts
_CHATS: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9}
_NUM_PROMPTS, _NEW_TOKENS = 16, 32


class PricedCalls:
    """Costs of a pair, which also sum the prices of the calls of its requests; see Costs."""

    def __init__(self, costs: EngineCosts) -> None:
        self._costs = costs
        self.seconds = 0.0  # without calls that compute a prompt

    def now(self) -> EngineCosts:
        return self._costs

    def observe(self, kind: CostKind, num_rows: int, seconds: float) -> None:
        """Add the price of a call; its measured ``seconds`` and sources are ignored."""
        if kind != "source":
            curve = self._costs.target if kind == "target" else self._costs.draft
            self.seconds += float(curve.up_to(num_rows)[num_rows])


def forecast(
    bundle: Bundle,
    requests: Sequence[tuple[Source, Sequence[int]]],
    *,
    are_chats: bool = False,
) -> list[ExpectedSpeed]:
    """Return the expected speed of a bundle's draft at each of ``WIDTHS``, on the CPU.

    requests: sources (None for models without sources) and token ids; the first 16 are answered.
    are_chats: whether the requests are chats or have sources. They are then answered at temperature
        0.7 with top-p 0.9, and greedily.

    BenchmarkError: the context is too short for the measured calls.
    """
    if bundle.context_length < MEASURED_ROWS[-1]:
        raise BenchmarkError(
            f"{bundle.path} has a context of {bundle.context_length} tokens, the costs of calls "
            f"are measured with up to {MEASURED_ROWS[-1]} rows; leave the speed out (--no-speed)"
        )
    requests = requests[:_NUM_PROMPTS]
    has_sources = requests[0][0] is not None
    room = bundle.context_length - max(len(prompt) for _, prompt in requests)
    with ExitStack() as stack:
        target, draft = load_pair(bundle)
        for model in (target, draft):
            stack.enter_context(model)
        # All windows of sound have the same length. Given rows are measured as text.
        given = bundle.manifest.target.given
        longest = (
            None
            if given is not None
            else max(
                (source for source, _ in requests),
                key=lambda source: len(source) if isinstance(source, tuple) else 0,
            )
        )
        costs = measure_costs(target, draft, time.perf_counter, longest)
        speeds = forecasts(
            target,
            draft,
            costs,
            requests,
            min(_NEW_TOKENS, room),
            are_chats=are_chats,
            ends=bundle.manifest.target.eos_token_ids if has_sources else (),
        )
        return list(speeds)


def forecasts(
    target: StepModel,
    draft: StepModel,
    costs: EngineCosts,
    requests: Sequence[tuple[Source, Sequence[int]]],
    new_tokens: int,
    *,
    are_chats: bool = False,
    ends: Sequence[int] = (),
) -> Iterator[ExpectedSpeed]:
    """Yield the forecast of each width for engines with these costs."""
    kinds = [(width, False) for width in WIDTHS]
    kinds += [(width, True) for width in GREEDY_WIDTHS if are_chats]
    for width, is_greedy in kinds:
        sampled: dict[str, Any] = {"strategy": "speculative" if width == 1 else "dsbd"}
        sampled |= _CHATS if are_chats else {"top_k": min(TOP_K, target.spec.vocab_size)}
        config = DecodingConfig(
            **({"strategy": "speculative-beam-search"} if is_greedy else sampled),
            num_beams=width,
            max_new_tokens=new_tokens,
            draft_policy="throughput",
            eos_token_id=[*ends] or None,
        )
        calls, estimator = PricedCalls(costs), AcceptanceEstimator()
        num_iterations, num_layers = 0, 0
        for seed, (source, prompt) in enumerate(requests):
            rng = np.random.default_rng(seed)
            request = DecodingRequest(
                prompt_ids=prompt,
                config=config,
                rng=rng,
                costs=calls,
                estimator=estimator,
                source=source,
            )
            stats = result_of(decode_iterations(request, target, draft)).stats
            num_iterations += stats.num_iterations
            num_layers += stats.num_iterations + stats.num_accepted_layers
        plain = num_layers * float(costs.target.up_to(width)[width])
        yield ExpectedSpeed(
            num_beams=width,
            tokens_per_iteration=num_layers / num_iterations,
            # If every sequence ends with its first token, there is nothing to speed up.
            speedup=plain / calls.seconds if calls.seconds else 1.0,
            is_greedy=is_greedy,
        )
