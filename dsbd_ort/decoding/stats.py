"""Statistics of a request: its cost and the acceptance of its drafts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from dsbd_ort.decoding.drafting.draft import Iteration
from dsbd_ort.decoding.engine_call import Clock, Meter


@dataclass(frozen=True, kw_only=True)
class DecodingStats:
    """Statistics of one request. Tokens are nodes of the forest, layers hold one or more of them.

    Attributes:
        num_iterations: of draft, verify, select, prune.
        num_draft_tokens: drafted nodes; one that stays in the forest counts once.
        num_accepted_tokens: drafted nodes that were committed.
        num_draft_layers: drafted layers, summed over iterations.
        num_accepted_layers: layers committed beyond the one that every iteration gives.
        mean_acceptance_length: layers committed per iteration, 1 + accepted layers / iterations.
        draft_acceptance_rate: accepted / drafted tokens, None if nothing was drafted.
        acceptance_histogram: [j] iterations that accepted j layers; sum j * [j] is accepted.
        mean_beam_width: beams kept per committed layer, mean.
        num_prompt_tokens, num_output_tokens: of the prompt, of the best sequence.
        num_cached_tokens: of the prompt, whose rows of the target an earlier request has computed.
        target_rows, draft_rows: rows computed, the prompt's included.
        target_calls, draft_calls: engine calls.
        time_to_first_token_s: from the request to the first committed layer.
        time_per_output_token_s: per further token of the best sequence, None without one.
        tokens_per_s: tokens of the best sequence per second of the whole request.
        draft_s, target_s: in the engines, calls whole that it shared with other requests;
            host_s: all other time, that of masks and binding included.
        kv_bytes_peak: most bytes allocated for both caches and for the distributions after nodes,
            None for models that do not report it.
        energy_joules: None if nothing can measure it.
        drafter: the option of the request; "none" if no draft was made.
    """

    num_iterations: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_draft_layers: int
    num_accepted_layers: int
    mean_acceptance_length: float
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    mean_beam_width: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    target_rows: int
    draft_rows: int
    target_calls: int
    draft_calls: int
    time_to_first_token_s: float
    time_per_output_token_s: float | None
    tokens_per_s: float
    draft_s: float
    target_s: float
    host_s: float
    kv_bytes_peak: int | None = None
    energy_joules: float | None = None
    drafter: str = "none"


@dataclass
class StatsRecorder:
    """Counts the iterations of a request and measures its time."""

    num_prompt_tokens: int
    target: Meter
    draft: Meter
    clock: Clock = time.perf_counter
    drafter: str = "none"
    num_cached_tokens: int = 0
    began: float = 0.0
    first_token_at: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_layers: int = 0
    accepted: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.began = self.clock()

    def observe(self, iteration: Iteration) -> None:
        if self.first_token_at is None:
            self.first_token_at = self.clock()
        self.num_draft_layers += len(iteration.drafted)
        self.num_draft_tokens += iteration.num_draft_tokens
        self.num_accepted_tokens += iteration.num_accepted_tokens
        self.accepted.append(len(iteration.committed) - 1)
        for beams in iteration.committed:
            self.widths.append(beams.width or 1)  # a search ends with none

    def stats(self, num_output_tokens: int) -> DecodingStats:
        now = self.clock()
        accepted = self.accepted
        total, num_iterations = now - self.began, len(accepted)
        num_accepted, num_drafted = self.num_accepted_tokens, self.num_draft_tokens
        num_accepted_layers = sum(accepted)
        first = (self.first_token_at or now) - self.began
        target, draft = self.target, self.draft
        more = num_output_tokens - 1
        return DecodingStats(
            num_iterations=num_iterations,
            num_draft_tokens=num_drafted,
            num_accepted_tokens=num_accepted,
            num_draft_layers=self.num_draft_layers,
            num_accepted_layers=num_accepted_layers,
            mean_acceptance_length=1 + num_accepted_layers / num_iterations,
            draft_acceptance_rate=num_accepted / num_drafted if num_drafted else None,
            acceptance_histogram=[accepted.count(n) for n in range(max(accepted) + 1)],
            mean_beam_width=sum(self.widths) / len(self.widths),
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            num_cached_tokens=self.num_cached_tokens,
            target_rows=target.rows,
            draft_rows=draft.rows,
            target_calls=target.calls,
            draft_calls=draft.calls,
            time_to_first_token_s=first,
            time_per_output_token_s=(total - first) / more if more > 0 else None,
            tokens_per_s=num_output_tokens / total if total > 0 else 0.0,
            draft_s=draft.engine_s,
            target_s=target.engine_s,
            host_s=total - target.engine_s - draft.engine_s,
            drafter=self.drafter if self.num_draft_layers or draft.calls else "none",
        )


def summed_stats(parts: Sequence[DecodingStats]) -> DecodingStats:
    """Return the statistics of requests that were decoded one after another, as one.

    Counts and times are sums, rates those of the sums; the first token is that of the first
    request, and the peak of memory the highest. Without ``parts`` all is zero or None.
    """
    sums: dict[str, Any] = {
        name: sum(getattr(part, name) for part in parts)
        for name in DecodingStats.__dataclass_fields__
        if name.startswith(("num_", "target_", "draft_", "host_")) and not name.endswith("_rate")
    }
    num_iterations, num_accepted_layers = sums["num_iterations"], sums["num_accepted_layers"]
    num_drafted, num_output = sums["num_draft_tokens"], sums["num_output_tokens"]
    whole_s = sums["draft_s"] + sums["target_s"] + sums["host_s"]
    first_s = parts[0].time_to_first_token_s if parts else 0.0
    layers = [part.num_iterations + part.num_accepted_layers for part in parts]
    beams = sum(part.mean_beam_width * n for part, n in zip(parts, layers, strict=True))
    peaks = [part.kv_bytes_peak for part in parts if part.kv_bytes_peak is not None]
    joules = [part.energy_joules for part in parts if part.energy_joules is not None]
    histograms = zip_longest(*(part.acceptance_histogram for part in parts), fillvalue=0)
    return DecodingStats(
        **sums,
        mean_acceptance_length=1 + num_accepted_layers / num_iterations if parts else 0.0,
        draft_acceptance_rate=sums["num_accepted_tokens"] / num_drafted if num_drafted else None,
        acceptance_histogram=[sum(of_length) for of_length in histograms],
        mean_beam_width=beams / sum(layers) if parts else 0.0,
        time_to_first_token_s=first_s,
        time_per_output_token_s=(whole_s - first_s) / (num_output - 1) if num_output > 1 else None,
        tokens_per_s=num_output / whole_s if whole_s > 0 else 0.0,
        kv_bytes_peak=max(peaks, default=None),
        energy_joules=sum(joules) if parts and len(joules) == len(parts) else None,
        drafter=next((part.drafter for part in parts if part.drafter != "none"), "none"),
    )
