"""Checkpoints that read pictures, and are refused before anything is exported."""

import json
import shutil
from pathlib import Path

import pytest

from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import check_pair, open_pair
from dsbd_runtime.media.given_grid import GridPicture
from dsbd_runtime.media.given_picture import CanvasPicture, TiledPicture
from scripts.picture_checkpoints import PICTURE_MODELS, write_picture_model


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return {
        name: write_picture_model(name, tmp_path_factory.mktemp(name)) for name in PICTURE_MODELS
    }


def opened(target, draft=None):
    config = ExportConfig(target=str(target), draft=draft and str(draft), output=target / "bundle")
    checkpoint, of_draft = open_pair(config)
    check_pair(checkpoint, of_draft, config)
    return checkpoint


def changed(folder, tmp_path, file, change):
    """Return a copy of a checkpoint with other content of one of its files."""
    copied = Path(shutil.copytree(folder, tmp_path / "changed"))
    content = json.loads((copied / file).read_text())
    change(content)
    (copied / file).write_text(json.dumps(content))
    return copied


ENTRIES = {
    "idefics3": (TiledPicture, {"tile_size": 32, "tile_rows": 4, "longest_edge": 128}, 0, 1),
    "smolvlm": (TiledPicture, {"tile_size": 32, "tile_rows": 4, "resample": 1}, 0, 1),
    "granite_docling": (CanvasPicture, {"least_tiles": 1, "most_tiles": 6, "tile_rows": 4}, 2, 1),
    "paddleocr_vl": (
        *(GridPicture, {"sizing": "area-from-units", "least_pixels": 3136, "positions_side": 4}),
        *(0, 3),
    ),
    "qwen3_vl": (
        GridPicture,
        {"most_pixels": 6144, "positions_side": 6, "align_corners": True},
        2,
        3,
    ),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_are_of_the_config_and_the_processor_files(written, name):
    kind, fields, levels, axes = ENTRIES[name]
    given = opened(written[name]).given
    assert type(given.medium) is kind
    assert {field: getattr(given.medium, field) for field in fields} == fields
    assert (given.levels, given.position_axes, given.width) == (levels, axes, 32)


def test_settings_may_be_in_the_file_of_the_whole_processor(written, tmp_path):
    folder = written["qwen3_vl"]
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    copied = changed(
        folder, tmp_path, "processor_config.json", lambda c: c.update(image_processor=settings)
    )
    (copied / "preprocessor_config.json").unlink()
    assert opened(copied).given == opened(folder).given


def test_a_checkpoint_without_settings_of_its_pictures(written, tmp_path):
    copied = Path(shutil.copytree(written["paddleocr_vl"], tmp_path / "copied"))
    (copied / "preprocessor_config.json").unlink()
    words = "preprocessor_config.json is missing, and processor_config.json has no image_processor"
    with pytest.raises(ExportError, match=words):
        opened(copied)


SETTINGS, CONFIG = "preprocessor_config.json", "config.json"
CHANGES = [
    (
        "idefics3",
        SETTINGS,
        {"do_image_splitting": False},
        "do_image_splitting False, expected True",
    ),
    ("idefics3", SETTINGS, {"max_image_size": {"longest_edge": 64}}, "tile .* is 64, .* reads 32"),
    ("granite_docling", SETTINGS, {"size": {"height": 16, "width": 16}}, "is 16, .* reads 32"),
    ("granite_docling", SETTINGS, {"fine_route": True}, "fine_route True, expected False"),
    ("granite_docling", SETTINGS, {"max_patches": 0}, "most_tiles is 0|least_tiles"),
    ("paddleocr_vl", SETTINGS, {"patch_size": 16}, "patch_size .* is 16, its encoder reads 14"),
    ("qwen3_vl", SETTINGS, {"merge_size": 1}, "merge_size .* is 1, its encoder reads 2"),
    ("qwen3_vl", SETTINGS, {"do_normalize": False}, "do_normalize False"),
    ("qwen3_vl", SETTINGS, {"image_mean": "x"}, "mean is 'x'"),
    ("qwen3_vl", CONFIG, {"image_token_id": 9_999}, "placeholder_token_id is 9999"),
]


@pytest.mark.parametrize(("name", "file", "content", "words"), CHANGES)
def test_contradictory_checkpoints(written, tmp_path, name, file, content, words):
    with pytest.raises(ExportError, match=words) as raised:
        opened(changed(written[name], tmp_path, file, lambda found: found.update(content)))
    assert "\n" not in str(raised.value)


def test_a_draft_that_reads_other_pictures(written):
    assert opened(written["idefics3"], written["idefics3"])
    with pytest.raises(ExportError, match=r"choose a draft of the same kind"):
        opened(written["idefics3"], written["qwen3_vl"])
