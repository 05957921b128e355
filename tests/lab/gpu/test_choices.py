"""Choices between settings: what is compared, the table, and the line that says which to take."""

from __future__ import annotations

import pytest

from lab.gpu.choices import COLUMNS, compared, lines_to_take, rows

# Milliseconds by bundle, setting and forward.
TIMES = {
    "twin": {
        "as it is": {
            "1 row": 1.0, "8 rows": 1.0, "36 rows": 2.0, "256 rows": 9.0,
            "36 rows padded to 40": 2.0, "36 rows padded to 64": 3.0,
            "36 rows padded to 64, padding sees itself alone": 3.03,
        },
        "--no-cuda-graphs": {"1 row": 2.0, "8 rows": 2.0, "36 rows": 4.0, "256 rows": 9.0},
    },
    "twin-int4": {"as it is": {"1 row": 0.5, "8 rows": 0.8, "36 rows": 1.28, "256 rows": 8.0}},
    "short": {"as it is": {"1 row": 1.0, "8 rows": 1.0}, "--no-cuda-graphs": {"1 row": 0.9}},
}  # fmt: skip


def test_every_choice_of_which_both_sides_were_measured_has_a_ratio():
    found = {(each.bundle, each.choice.name): each.ratio for each in compared(TIMES)}
    assert found == {
        ("twin", "padding to"): pytest.approx(1.5),
        ("twin", "padding rows see"): pytest.approx(1.01),
        ("twin", "calls"): pytest.approx(2.0),
        ("twin", "weights"): pytest.approx(0.256 ** (1 / 3)),  # of 0.5, 0.8 and 0.64
        ("short", "calls"): pytest.approx(0.9),
    }


def test_a_line_for_each_bundle_names_the_setting_to_take():
    assert lines_to_take(compared(TIMES)) == [
        "To take for twin: padding to sizes in steps of 8 (the other takes 1.50 of its time); "
        "padding rows see column 0 too (no difference); calls recorded (the other takes 2.00 of "
        "its time); weights --quantize int4 "
        "(0.63 of the time).",
        "To take for short: calls --no-cuda-graphs (0.90 of the time).",
    ]


def test_a_row_shows_the_forwards_that_were_compared():
    shown = rows(compared(TIMES))
    assert all(len(cells) == len(COLUMNS) for cells in shown)
    assert [cells[1:] for cells in shown if cells[1] in ("padding to", "weights")] == [
        ("padding to", "sizes in steps of 8", "-", "-", "2.000", "-", ""),
        ("padding to", "powers of two", "-", "-", "3.000", "-", "1.50"),
        ("weights", "not quantized", "1.000", "1.000", "2.000", "9.000", ""),
        ("weights", "--quantize int4", "0.500", "0.800", "1.280", "8.000", "0.63"),
    ]
