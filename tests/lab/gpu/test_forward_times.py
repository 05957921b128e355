"""The forwards that are timed."""

import pytest

from dsbd_runtime.bundle_files.bundle import open_bundle
from lab.gpu.forward_times import cells_of, milliseconds_of
from tests.runtime.fake_device import open_on_fake
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle


@pytest.mark.parametrize(("num_cached", "timed"), [(40, [1, 8, 36]), (70, [1, 8])])
def test_forwards_beyond_the_context_are_left_out_and_the_cache_is_as_before(
    tmp_path, num_cached, timed
):
    write_tiny_bundle(tmp_path / "bundle", target=TinyModel(context_length=80))
    with open_on_fake(open_bundle(tmp_path / "bundle"), is_poisoned=True).model as model:
        found = milliseconds_of(model, num_cached, num_rounds=1, calls_a_round=1)
        assert model.num_rows == num_cached
    assert list(found) == timed and all(time > 0 for time in found.values())


def test_a_row_has_a_cell_for_every_forward():
    assert cells_of({1: 1.5, 8: 2.25}, 1000) == ("1,000", "1.500", "2.250", "-", "-")
