"""What is measured on every bundle: beam sampling, and DSBD of the same law in several shapes."""

from __future__ import annotations

# (beams of the law, drafted layers, candidates of a layer): on a GPU a wide draft costs little
SHAPES = ((2, 4, 2), (2, 4, 4), (2, 4, 8), (2, 4, 16), (2, 6, 16), (2, 4, 32),
          (4, 4, 4), (4, 4, 8), (4, 4, 16), (4, 6, 16), (4, 4, 32))  # fmt: skip
WIDTHS = tuple(dict.fromkeys(width for width, _, _ in SHAPES))
TOP_K = 20


def run_texts() -> list[str]:
    """Return the texts of dsbd-bench's ``--run``; it adds beam-sample of every width itself."""
    fixed = [
        f"dsbd num_beams={width} width_policy=fixed draft_length={layers} draft_beams={beams}"
        for width, layers, beams in SHAPES
    ]
    learned = [
        f"dsbd num_beams={width} width_policy=fixed draft_policy=throughput" for width in WIDTHS
    ]
    return fixed + learned
