"""Report of measured speed: tables, and the plot of quality against speed (frontier)."""

from math import cos, pi, sin
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from dsbd_ort.benchmark.bootstrap import Estimate, Spread
from lab.frame.page import ratio_cell, spread_cell
from scripts.document_sections import table

# Every distribution without and with a draft, then the dynamic widths between them.
FRONTIER_RUNS = (
    "sample",
    "speculative draft_policy=throughput",
    *(f"beam-sample num_beams={width}" for width in (2, 3, 4)),
    *(f"dsbd num_beams={width} draft_policy=throughput" for width in (2, 3, 4)),
    *(
        f"dsbd num_beams={width} min_beams={least} accept_threshold={threshold} "
        f"draft_length=4 draft_beams={drafted} name='W={width}, at least {least}, {threshold}'"
        for width, least, threshold, drafted in (
            (2, 1, 0.7, 2),
            (2, 1, 0.5, 2),
            (3, 1, 0.7, 3),
            (3, 2, 0.7, 3),
            (4, 1, 0.7, 4),
            (4, 2, 0.7, 4),
            (4, 2, 0.5, 4),
        )
    ),
    "greedy",
    "speculative-beam-search num_beams=1 draft_policy=throughput",
    *(f"beam-search num_beams={width}" for width in (2, 4)),
    *(f"speculative-beam-search num_beams={width} draft_policy=throughput" for width in (2, 4)),
    "mjsd draft_length=4 draft_beams=4 top_k=64",
)
_PLACES = [  # offsets of a label's centre from its point, in points (1/72 inch), nearest first
    (round(radius * 2.2 * cos(angle)), round(radius * sin(angle)))
    for radius in (11, 17, 24, 32)
    for angle in (
        pi * eighth / 8 for eighth in (2, 14, 6, 10, 0, 8, 4, 12, 1, 3, 5, 7, 9, 11, 13, 15)
    )
]
_EXPLANATION = (
    "W: beams of the output; one line, one distribution of outputs. Dynamic width: fewest to most "
    "beams, accept_threshold.\nUp is likelier text, right is faster."
)
DOTS_PER_INCH = 110
PANEL_INCHES = (6.5, 5.5)
# family: (name in the legend, colour, marker, whether a line joins its widths)
FAMILIES = {
    "beam-sample": ("beam sampling", "tab:blue", "o", True),
    "dsbd fixed": ("dsbd, the same tokens", "tab:orange", "o", True),
    "dsbd threshold": ("dsbd, dynamic width", "tab:red", "x", False),
    "beam-search": ("beam search", "tab:green", "s", True),
    "speculative-beam-search": ("the same tokens, speculative", "tab:olive", "s", True),
    "mjsd": ("mjsd", "tab:purple", "^", False),
}
OF_FAMILY = {
    "sample": "beam-sample",
    "speculative": "dsbd fixed",
    "greedy": "beam-search",
}


def plot_frontier(reports: dict[str, dict[str, Any]], file: Path) -> None:
    """Plot one panel per report of dsbd-bench, side by side; the keys are the titles."""
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * len(reports), height), layout="constrained", dpi=DOTS_PER_INCH)
    panels = figure.subplots(1, len(reports), squeeze=False)[0]
    for axes, (title, report) in zip(panels, reports.items(), strict=True):
        _plot_panel(axes, report["runs"])
        axes.set_title(title)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(_EXPLANATION, fontsize="medium")
    place_labels(figure)
    figure.savefig(file)


def place_labels(figure: Figure) -> None:
    """Move every annotation to the first free place around its point.

    A place is free if it lies within the axes and overlaps no other annotation and no point.
    """
    figure.draw_without_rendering()
    for axes in figure.axes:
        points = [
            axes.transData.transform(xy)
            for line in axes.lines
            for xy in np.asarray(line.get_xydata())
        ]
        taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in points]
        for label in axes.texts:
            assert isinstance(label, Annotation)
            for place in _PLACES:
                label.set_position(place)
                box = label.get_window_extent()
                is_inside = all(axes.bbox.contains(*corner) for corner in box.corners())
                if is_inside and not any(box.overlaps(other) for other in taken):
                    break
            taken.append(box)


def _plot_panel(axes: Axes, runs: list[dict[str, Any]]) -> None:
    for family, (label, colour, marker, is_joined) in FAMILIES.items():
        members = [run for run in runs if _family(run) == family]
        members.sort(key=lambda run: int(run["settings"]["num_beams"]))
        speeds = [run["tokens_per_s"]["median"] for run in members]
        worths = [run["logprob_per_token"] for run in members]
        line = "-" if is_joined else ""
        axes.plot(speeds, worths, color=colour, marker=marker, linestyle=line, label=label)
        for run, speed, worth in zip(members, speeds, worths, strict=True):
            axes.annotate(
                _short_name(run),
                (speed, worth),
                _PLACES[0],
                textcoords="offset points",
                fontsize=8,
                color=colour,
                ha="center",
                va="center",
            )
    axes.set(
        xlabel="tokens/s (median)", ylabel="target log-probability per token, best beam (nats)"
    )
    axes.margins(0.09)


def _family(run: dict[str, Any]) -> str:
    strategy = str(run["settings"]["strategy"])
    if strategy == "dsbd":
        return f"dsbd {run['settings']['width_policy']}"
    return OF_FAMILY.get(strategy, strategy)


def _short_name(run: dict[str, Any]) -> str:
    settings = run["settings"]
    width = settings["num_beams"]
    if settings["width_policy"] == "threshold":
        return f"{settings['min_beams']} to {width}, {settings['accept_threshold']:g}"
    if settings["strategy"] == "mjsd":
        return "4 draft beams"
    return f"W={width}"


def draft_calls_of(reports: dict[str, dict[str, Any]]) -> str:
    """Return a table of acceptance and call times of drafts; the keys name twin and draft."""
    columns = ("twin and draft", "run", "accepted", "ms a draft call", "draft calls an iteration")
    rows = []
    for title, report in reports.items():
        for run in report["runs"]:
            stats = [one["stats"] for one in report["measurements"] if one["run"] == run["name"]]
            calls = sum(each["draft_calls"] for each in stats)
            if not calls:
                continue
            cells = (
                title,
                run["name"],
                f"{run['draft_acceptance_rate']:.2f}",
                f"{1e3 * sum(each['draft_s'] for each in stats) / calls:.2f}",
                f"{calls / sum(each['num_iterations'] for each in stats):.1f}",
            )
            rows.append(cells)
    return "\n".join(table(columns, rows))


def same_drafts_of(size: str, twin: dict[str, Any], trained: dict[str, Any]) -> str:
    """Return a table of the acceptance of the same drafts by a twin and by its trained target.

    The runs are those of ``trained``; their prompts, repetitions and seeds must equal the twin's.
    """
    runs = {run["name"]: run for run in twin["runs"]}
    rows = []
    for run in trained["runs"]:
        if run["draft_acceptance_rate"] is None:
            continue
        pairs = list(
            zip(_tokens_of(trained, run["name"]), _tokens_of(twin, run["name"]), strict=True)
        )
        rates = (each["draft_acceptance_rate"] for each in (run, runs[run["name"]]))
        same = sum(one == other for one, other in pairs)
        rows.append((run["name"], *(f"{rate:.4f}" for rate in rates), f"{same}/{len(pairs)}"))
    columns = ("run", "accepted, the trained pair", f"accepted, {size} twin", "same tokens")
    return "\n".join(table(columns, rows))


def _tokens_of(report: dict[str, Any], run: str) -> list[tuple[Any, ...]]:
    """Return (prompt, repetition, tokens) of all requests of a run, in order."""
    names = ("prompt_index", "repetition", "token_ids")
    return sorted(
        tuple(one[name] for name in names) for one in report["measurements"] if one["run"] == run
    )


def table_of(report: dict[str, Any], title: str, level: int = 3) -> str:
    """Return the table of one report as Markdown, under a heading of ``level``."""
    columns = (
        *("run", "tokens/s", "speed-up", "same tokens", "nats/token", "tokens/iteration"),
        *("rows", "target / draft / host ms per token", "host us/iteration"),
    )
    rows = []
    for run in report["runs"]:
        compared, split = run["comparison"], run["seconds_per_token"]
        speedup, same = "", ""
        if compared is not None:
            speedup = ratio_cell(Estimate(**compared["speedup"]))
            same = f"{compared['num_identical']}/{compared['num_pairs']}"
        cells = (
            run["name"],
            spread_cell(Spread(**run["tokens_per_s"])),
            speedup,
            same,
            f"{run['logprob_per_token']:.3f}",
            f"{run['mean_acceptance_length']:.2f}",
            f"{run['target_rows_per_iteration']:.1f}",
            " / ".join(f"{1e3 * split[part]:.2f}" for part in ("target", "draft", "host")),
            f"{run['host_us_per_iteration']:.0f}",
        )
        rows.append(cells)
    machine, versions = report["machine"], report["versions"]
    lines = [
        f"{'#' * level} {title}",
        "",
        *table(columns, rows),
        "",
        f"{report['created'][:10]}, {machine['processor']}, {report['threads']} threads, "
        f"onnxruntime {versions['onnxruntime']}, {len(report['prompts'])} prompts x "
        f"{report['repetitions']} repetitions; medians with quartiles, speed-ups with a 95 % "
        "bootstrap interval over pairs.",
    ]
    return "\n".join(lines)
