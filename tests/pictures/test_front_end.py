"""The front end of pictures in prompts, of entries as manifests have them."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from dsbd_ort.media.message_parts import MediaLimits
from dsbd_ort.media.pictures import PictureFrontEnd
from dsbd_runtime.errors import BundleError
from dsbd_runtime.media.given_grid import GridPicture
from dsbd_runtime.media.given_picture import CanvasPicture, TiledPicture
from dsbd_runtime.parts.given.given_medium import MediumEntry
from dsbd_runtime.typed_json import typed
from tests.pictures.files import drawn, file_of

VALUES: dict[str, Any] = {"resample": 3, "rescale_factor": 1 / 255, "mean": [0.5] * 3}
VALUES["std"] = [0.25, 0.5, 0.75]
TILES: dict[str, Any] = {**VALUES, "tile_size": 32, "tile_rows": 4}
ENTRIES = {
    "tiles": TiledPicture(**TILES, longest_edge=96),
    "canvas-tiles": CanvasPicture(**TILES, least_tiles=1, most_tiles=6),
    "grid": GridPicture(
        **VALUES,
        patch_size=4,
        merge_size=2,
        sizing="area",
        least_pixels=16 * 16,
        most_pixels=96 * 96,
        positions_side=5,
    ),
}
ROWS = {"tiles": 4 * (3 * 3 + 1), "canvas-tiles": 4 * (2 * 3 + 1), "grid": 10 * 14}
GRIDS = {"tiles": None, "canvas-tiles": None, "grid": (1, 10, 14)}


@pytest.mark.parametrize("kind", ENTRIES)
def test_a_file_becomes_rows_text_and_pieces(kind: str) -> None:
    entry = ENTRIES[kind]
    front_end = PictureFrontEnd(entry, "<P>")
    medium = front_end.read(file_of(drawn(100, 140)), 1000, MediaLimits())
    assert medium.num_rows == ROWS[kind] == medium.expansion.count("<P>")
    assert medium.grid == GRIDS[kind]
    pieces = medium.pieces()
    assert sum(piece.num_rows for piece in pieces) == medium.num_rows
    for piece in pieces:
        assert set(piece.inputs) == set(entry.encoder_inputs)
        for name, spec in entry.encoder_inputs.items():
            array = piece.inputs[name]
            assert {"float32": "tensor(float)"}.get(array.dtype.name, "tensor(int64)") == spec.type
            shapes = zip(array.shape, spec.shape, strict=True)
            assert all(isinstance(wanted, str) or wanted == found for found, wanted in shapes)
    again = front_end.read(file_of(drawn(100, 140)), 1000, MediaLimits()).pieces()
    assert [piece.digest for piece in again] == [piece.digest for piece in pieces]


@pytest.mark.parametrize("kind", ENTRIES)
def test_entries_are_read_from_a_manifest(kind: str) -> None:
    written = json.loads(json.dumps(dataclasses.asdict(ENTRIES[kind])))
    assert written["kind"] == kind
    assert typed(MediumEntry, written, "medium") == ENTRIES[kind]
    del written["std"]
    with pytest.raises(BundleError, match=r"missing or unknown entries \['std'\]"):
        typed(MediumEntry, written, "medium")


def test_values_without_rescaling_and_normalization() -> None:
    entry = dataclasses.replace(ENTRIES["grid"], rescale_factor=1.0, mean=[0.0] * 3, std=[1.0] * 3)
    pixels = np.asarray(drawn(3, 4))
    assert np.array_equal(entry.normalized(pixels), pixels.transpose(2, 0, 1))
