"""One report of dsbd-bench as a table in markdown."""

from __future__ import annotations

from typing import Any


def table_of(report: dict[str, Any], title: str) -> str:
    """Return the table of one report, in markdown."""
    columns = ("run", "tokens/s", "speed-up", "same tokens", "nats/token", "tokens/iteration")
    columns += ("rows", "target / draft / host ms per token", "host us/iteration")
    lines = [f"### {title}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for run in report["runs"]:
        compared, split = run["comparison"], run["seconds_per_token"]
        speedup, same = "", ""
        if compared is not None:
            low, high = compared["speedup"]["low"], compared["speedup"]["high"]
            speedup = f"**{compared['speedup']['value']:.2f}** ({low:.2f} to {high:.2f})"
            same = f"{compared['num_identical']}/{compared['num_pairs']}"
        rate = run["tokens_per_s"]
        cells = (
            run["name"],
            f"{rate['median']:.1f} ({rate['quartile_1']:.1f} to {rate['quartile_3']:.1f})",
            speedup,
            same,
            f"{run['logprob_per_token']:.3f}",
            f"{run['mean_acceptance_length']:.2f}",
            f"{run['target_rows_per_iteration']:.1f}",
            " / ".join(f"{1e3 * split[part]:.2f}" for part in ("target", "draft", "host")),
            f"{run['host_us_per_iteration']:.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    machine, versions = report["machine"], report["versions"]
    lines += [
        "",
        f"{report['created'][:10]}, {machine['processor']}, {report['threads']} threads, "
        f"onnxruntime {versions['onnxruntime']}, {len(report['prompts'])} prompts x "
        f"{report['repetitions']} repetitions; medians with quartiles, speed-ups with a 95 % "
        "bootstrap interval over pairs.",
    ]
    return "\n".join(lines)
