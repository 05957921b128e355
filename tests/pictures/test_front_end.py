"""Entries of media as manifests have them, and the front end of pictures by them."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from dsbd_ort.media.message_parts import MediaLimits
from dsbd_ort.media.pictures import PictureFrontEnd
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.media.given_grid import GridPicture
from dsbd_runtime.media.given_picture import CanvasPicture, TiledPicture
from dsbd_runtime.media.given_sound import StackedSound, WindowedSound
from dsbd_runtime.parts.given.given_medium import MediumEntry
from dsbd_runtime.typed_json import typed
from tests.pictures.files import drawn, file_of

VALUES: dict[str, Any] = {"resample": 3, "rescale_factor": 1 / 255, "mean": [0.5] * 3}
VALUES["std"] = [0.25, 0.5, 0.75]
TILES: dict[str, Any] = {**VALUES, "tile_size": 32, "tile_rows": 4}
ENTRIES: dict[str, Any] = {
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
    "stacked-sound": StackedSound(
        recipe="granite_speech",
        sampling_rate=16_000,
        num_mels=8,
        n_fft=512,
        window_length=400,
        hop_length=160,
        block_pairs=20,
        window_pairs=15,
        window_rows=3,
        num_characters=256,
    ),
    "windowed-sound": WindowedSound(
        recipe="glmasr",
        sampling_rate=16_000,
        num_mels=8,
        n_fft=400,
        hop_length=160,
        num_frames=200,
        merged=4,
        hides_padding=False,
        most_windows=3,
    ),
}
ROWS = {"tiles": 4 * (3 * 3 + 1), "canvas-tiles": 4 * (2 * 3 + 1), "grid": 10 * 14}
GRIDS = {"tiles": None, "canvas-tiles": None, "grid": (1, 10, 14)}


@pytest.mark.parametrize("kind", ROWS)
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
    name = "std" if "std" in written else "num_mels"
    del written[name]
    with pytest.raises(BundleError, match=rf"missing or unknown entries \['{name}'\]"):
        typed(MediumEntry, written, "medium")


INVALID = [
    ("tiles", {"tile_size": 5000}, "entry: tile_size is 5000, expected at most 4096"),
    ("tiles", {"tile_rows": 0}, "tile_rows is 0, expected a number above 0"),
    ("tiles", {"longest_edge": 10_000}, "longest_edge is 10000, expected at most 8192"),
    ("tiles", {"resample": 9}, "resample is 9, expected 0 to 5"),
    ("tiles", {"mean": [0.5]}, "mean and std is .* expected three numbers each that make finite"),
    ("tiles", {"std": [1.0, 0.0, 1.0]}, "mean and std is .* expected three numbers each"),
    ("canvas-tiles", {"least_tiles": 33}, "least_tiles"),
    ("canvas-tiles", {"most_tiles": 257}, "most_tiles"),
    ("canvas-tiles", {"dense_most_tiles": 300}, "dense_most_tiles"),
    ("grid", {"patch_size": 0}, "entry: patch_size is 0, expected a number above 0"),
    ("grid", {"sizing": "other"}, "entry has sizing 'other', which this version of dsbd-ort"),
    ("grid", {"most_pixels": 2**27}, "most_pixels is 134217728, expected at most"),
    ("grid", {"least_pixels": 2**25}, "least_pixels is 33554432, expected at most"),
    ("grid", {"positions_side": 5000}, "positions_side is 5000, expected at most 4096"),
    ("stacked-sound", {"window_length": 600}, "window_length is 600"),
    ("stacked-sound", {"window_rows": 16}, "window_rows is 16"),
    ("stacked-sound", {"num_characters": -1}, "num_characters is -1"),
    ("stacked-sound", {"block_pairs": 0}, "block_pairs is 0"),
    ("stacked-sound", {"hop_length": 10**9}, "hop_length is 1000000000"),
    ("windowed-sound", {"num_frames": 204}, "num_frames is 204"),
    ("windowed-sound", {"merged": 0}, "merged is 0"),
    ("windowed-sound", {"num_mels": 513}, "num_mels is 513"),
]


@pytest.mark.parametrize(("kind", "changes", "words"), INVALID)
def test_invalid_entries(kind: str, changes: dict[str, Any], words: str) -> None:
    entry = ENTRIES[kind]
    entry.check("entry")
    with pytest.raises(BundleError, match=words):
        dataclasses.replace(entry, **changes).check("entry")


def test_values_without_rescaling_and_normalization() -> None:
    entry = dataclasses.replace(ENTRIES["grid"], rescale_factor=1.0, mean=[0.0] * 3, std=[1.0] * 3)
    pixels = np.asarray(drawn(3, 4))
    assert np.array_equal(entry.normalized(pixels), pixels.transpose(2, 0, 1))


@pytest.mark.parametrize("kind", ["stacked-sound", "windowed-sound"])
def test_features_of_other_shapes(kind: str) -> None:
    for shape in [(9, 200), (8, 1), (8,)]:
        with pytest.raises(InputError, match="the features of a sound have shape"):
            ENTRIES[kind].pieces(np.zeros(shape, np.float32))


def test_the_end_of_a_sound_that_is_too_short_for_a_row_has_no_piece() -> None:
    entry = ENTRIES["windowed-sound"]
    features = np.zeros((8, 400), np.float32)
    assert [each.num_rows for each in entry.pieces(features, 206)] == [25]
    assert [each.num_rows for each in entry.pieces(features, 207)] == [25, 1]
    assert entry.num_rows(206) == 25 and entry.num_rows(207) == 26
    assert [each.num_rows for each in entry.pieces(features[:, :200], 1)] == [1]
