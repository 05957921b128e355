"""The figure of a benchmark: speed-up by width, time split, acceptance, quality over speed."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dsbd_ort.benchmark.bench_run import BenchmarkError
from dsbd_ort.benchmark.report import RunSummary
from dsbd_ort.output_files import write_whole

_ESTIMATE = ("value", "low", "high")
NUM_COLOURS = 20  # of the map tab20
SIZE_INCHES = (16.0, 11.0)
DOTS_PER_INCH = 120
_BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13)}
"""Place of a legend: below the label of the axis, away from bars and lines."""
TIME_COLOURS = {"draft": "tab:orange", "target": "tab:blue", "host": "tab:grey"}


def check_picture(file: Path) -> None:
    """Raise BenchmarkError unless the name ends in a file type that can be written."""
    file_types = sorted(Figure().canvas.get_supported_filetypes())
    if file.suffix.removeprefix(".") not in file_types:
        raise BenchmarkError(
            f"{file} has no known file type of a plot; end its name in one of "
            f"{', '.join(file_types)}"
        )


def plot(runs: Sequence[RunSummary], title: str, file: Path) -> None:
    """Write the four plots as one picture."""
    figure = Figure(figsize=SIZE_INCHES, layout="constrained", dpi=DOTS_PER_INCH)
    plots = (_plot_speedups, _plot_time_split, _plot_acceptance, _plot_quality)
    for part, draw in zip(figure.subfigures(2, 2, squeeze=False).flat, plots, strict=True):
        draw(part.subplots(), runs)  # each lays out its labels and legend by itself
    figure.suptitle(title)
    picture = io.BytesIO()
    figure.savefig(picture, format=file.suffix.removeprefix("."))
    write_whole(file, picture.getvalue())


def _plot_speedups(axes: Axes, runs: Sequence[RunSummary]) -> None:
    lines: dict[str, list[RunSummary]] = {}
    for run in runs:
        if run.comparison is not None:
            lines.setdefault(_family(run), []).append(run)
    for name, members in lines.items():
        members = sorted(members, key=lambda run: int(run.settings["num_beams"]))
        speedups = [run.comparison.speedup for run in members if run.comparison is not None]
        value, low, high = (np.array([getattr(e, f) for e in speedups]) for f in _ESTIMATE)
        widths = [run.settings["num_beams"] for run in members]
        axes.errorbar(
            widths,
            value,
            yerr=np.stack([value - low, high - value]),
            label=name,
            marker="o",
            capsize=4,
            linestyle="solid" if len(set(widths)) == len(widths) else "none",
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(title="speed-up over the baseline, 95 % interval", xlabel="num_beams")
    axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if lines:
        axes.legend(**_BELOW, ncols=4)


def _family(run: RunSummary) -> str:
    if run.settings["strategy"] == "dsbd":
        return f"dsbd {run.settings['width_policy']}"
    return str(run.settings["strategy"])


def _plot_time_split(axes: Axes, runs: Sequence[RunSummary]) -> None:
    names = [run.name for run in runs]
    left = np.zeros(len(runs))
    for part, colour in TIME_COLOURS.items():
        milliseconds = np.array([1e3 * getattr(run.seconds_per_token, part) for run in runs])
        axes.barh(names, milliseconds, left=left, color=colour, label=part)
        left += milliseconds
    axes.invert_yaxis()
    axes.set(title="time split", xlabel="ms per token")
    axes.legend(**_BELOW, ncols=len(TIME_COLOURS))


def _plot_acceptance(axes: Axes, runs: Sequence[RunSummary]) -> None:
    drafting = [run for run in runs if run.draft_acceptance_rate is not None]
    for run in drafting:
        share = np.array(run.acceptance_histogram) / sum(run.acceptance_histogram)
        axes.plot(np.arange(len(share)), share, marker="o", label=run.name)
    axes.set(title="accepted layers per iteration", xlabel="layers", ylabel="share of iterations")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if drafting:
        axes.legend(**_BELOW, fontsize="small", ncols=2)


def _plot_quality(axes: Axes, runs: Sequence[RunSummary]) -> None:
    axes.set_prop_cycle(color=colormaps["tab20"](np.arange(NUM_COLOURS)))
    for run in runs:
        speed = run.tokens_per_s
        spread = [[speed.median - speed.quartile_1], [speed.quartile_3 - speed.median]]
        axes.errorbar(
            [speed.median], [run.logprob_per_token], xerr=spread, marker="o", label=run.name
        )
    axes.set(
        title="quality over speed",
        xlabel="tokens/s (median, quartiles)",
        ylabel="target log-probability per token (nats)",
    )
    axes.legend(**_BELOW, fontsize="small", ncols=2)
