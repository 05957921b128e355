"""Host time with real engines by number of beams: a table and its plot."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dsbd_ort.benchmark.bench_run import PROMPTS
from dsbd_ort.decoding import DecodingStats
from dsbd_ort.pipeline import Pipeline

TOP_K = 50
DSBD: dict[str, Any] = {"strategy": "dsbd", "top_k": TOP_K}


def runs_of(num_beams: int) -> dict[str, dict[str, Any]]:
    """Return the options of every run, by name."""
    two_layers = {"draft_policy": "fixed", "draft_length": 2, "draft_beams": num_beams}
    return {
        "beam-sample": {"strategy": "beam-sample", "top_k": TOP_K},
        "beam-search": {"strategy": "beam-search"},
        "dsbd fixed, 2 layers": DSBD | {"width_policy": "fixed"} | two_layers,
        "dsbd threshold, 2 layers": DSBD | {"width_policy": "threshold"} | two_layers,
        "dsbd throughput": DSBD | {"width_policy": "fixed", "draft_policy": "throughput"},
    }


@dataclass(frozen=True)
class HostTime:
    """Medians over the requests of one run.

    Attributes:
        host_us: host time per iteration, microseconds.
        ratio: host time / allowed host time.
        share: host time / total time of a request.
    """

    host_us: float
    ratio: float
    share: float


def allowed_us(stats: DecodingStats, num_beams: int) -> float:
    """Return the allowed host time: 100 us per iteration + (30 us + 4 us per beam) for each layer.

    Drafted and selected layers both count.
    """
    num_selected = stats.num_iterations + stats.num_accepted_layers
    num_layers = stats.num_draft_layers + num_selected
    return 100.0 * stats.num_iterations + (30.0 + 4.0 * num_beams) * num_layers


def measure(
    bundle: Path, beams: Sequence[int], repetitions: int, threads: int
) -> dict[str, dict[int, HostTime]]:
    """Return the host times by run and number of beams; the first request of each is not counted.

    Each round has one request of every run, so that a disturbance does not hit a single run.
    """
    times_by_run: dict[str, dict[int, list[HostTime]]] = {}
    with Pipeline.from_bundle(bundle, num_threads=threads) as pipeline:
        for num_beams in beams:
            for seed in range(repetitions + 1):
                for name, options in runs_of(num_beams).items():
                    text = PROMPTS[seed % len(PROMPTS)]
                    length = 64 if num_beams <= 32 else 8
                    stats = pipeline.generate(
                        text, num_beams=num_beams, max_new_tokens=length, seed=seed, **options
                    ).stats
                    if seed:
                        times = times_by_run.setdefault(name, {}).setdefault(num_beams, [])
                        times.append(_host_time(stats, num_beams))
    return {
        name: {
            num_beams: HostTime(
                *(statistics.median(getattr(t, part) for t in times) for part in _PARTS)
            )
            for num_beams, times in by_beams.items()
        }
        for name, by_beams in times_by_run.items()
    }


_PARTS = ("host_us", "ratio", "share")


def _host_time(stats: DecodingStats, num_beams: int) -> HostTime:
    host_us = 1e6 * stats.host_s
    whole_us = host_us + 1e6 * (stats.target_s + stats.draft_s)
    return HostTime(
        host_us / stats.num_iterations,
        host_us / allowed_us(stats, num_beams),
        host_us / whole_us,
    )


def rows(times: dict[str, dict[int, HostTime]]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table: microseconds per iteration and (in brackets) ``ratio``."""
    for name, by_beams in times.items():
        yield name, *(f"{time.host_us:,.0f} ({time.ratio:.2f})" for time in by_beams.values())


def plot(times: dict[str, dict[int, HostTime]], file: Path) -> None:
    """Plot host time per iteration against the number of beams, both axes logarithmic."""
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.subplots()
    for name, by_beams in times.items():
        axes.loglog(list(by_beams), [t.host_us for t in by_beams.values()], "o-", label=name)
    widths = list(next(iter(times.values())))
    allowed = [130.0 + 4.0 * num_beams for num_beams in widths]
    axes.loglog(widths, allowed, "k--", label="100 us + (30 us + 4 us a beam), one layer")
    axes.set_xlabel("beams")
    axes.set_ylabel("host time an iteration, us")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=110)
