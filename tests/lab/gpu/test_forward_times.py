"""The forwards that are timed, and the choices between settings that follow from the times."""

import numpy as np
import pytest

from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.device.device_binder import forward_bucket
from dsbd_runtime.engine.settings import EngineSettings
from lab.gpu.choices import CHOICES, COLUMNS, compared, lines_to_take, rows
from lab.gpu.forward_times import AS_IT_IS, SETTINGS, by_setting, forwards_after, milliseconds_of
from tests.runtime.fake_device import open_on_fake
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

NAMES = [
    "1 row", "8 rows", "36 rows", "256 rows", "36 rows padded to 40", "36 rows padded to 64",
    "36 rows padded to 64, padding sees itself alone",
]  # fmt: skip


def test_padding_is_written_out_and_sees_column_0_or_itself_alone():
    found = forwards_after(20, 50)
    assert list(found) == NAMES
    assert [forward.num_new for forward in found.values()] == [1, 8, 36, 256, 40, 64, 64]
    seen, alone = (found[name].mask for name in NAMES[-2:])
    assert (seen[:36] == alone[:36]).all() and seen[35].sum() == 20 + 36
    assert np.argwhere(seen[36:]).tolist() == [
        pair for row in range(28) for pair in ([row, 0], [row, 20 + 36 + row])
    ]
    assert np.argwhere(alone[36:]).tolist() == [[row, 56 + row] for row in range(28)]


def test_written_out_padding_is_what_a_session_pads_to():
    """Else the choice would compare other sizes than those that are chosen between."""
    assert [forward_bucket(number, 256) for number in (36, 40, 64)] == [40, 40, 64]


def test_every_choice_compares_what_is_timed():
    sides = [side for choice in CHOICES for side in (choice.default, choice.other)]
    assert {side.setting for side in sides} <= set(SETTINGS)
    assert {side.forward for side in sides} <= {"", *NAMES}


def test_forwards_beyond_the_context_are_left_out_and_the_cache_is_as_before(tmp_path):
    write_tiny_bundle(tmp_path / "bundle", target=TinyModel(context_length=80))
    model = open_on_fake(open_bundle(tmp_path / "bundle"), is_poisoned=True).model
    with model:
        found = milliseconds_of(model, num_rounds=1, calls_a_round=1)
        assert model.num_rows == 40
    assert list(found) == [name for name in NAMES if name != "256 rows"]
    assert all(time > 0 for time in found.values())


class Opened:
    def __init__(self, log, model, options):
        self.log, self.model, self.options = log, model, options

    def __enter__(self):
        self.log.append(("open", self.options))
        self.model.keep(np.arange(0))
        return self.model

    def __exit__(self, *error):
        self.log.append(("close", self.options))


def test_settings_take_turns_and_one_model_is_open_at_a_time(tmp_path):
    write_tiny_bundle(tmp_path / "bundle")
    log, repeats = [], {"num_rounds": 1, "calls_a_round": 1}
    plain, other = EngineSettings(), EngineSettings(cuda_graphs=False)
    with open_on_fake(open_bundle(tmp_path / "bundle"), is_poisoned=False).model as model:
        found = by_setting(
            {AS_IT_IS: plain, "other": other},
            lambda settings: Opened(log, model, settings),
            **repeats,
        )
    assert log == [
        (what, options) for options in (plain, other, other, plain) for what in ("open", "close")
    ]
    assert found.keys() == {AS_IT_IS, "other"} and found["other"].keys() == found[AS_IT_IS].keys()


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
