"""Tiles against transformers' processors: layouts, values and texts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.models.granite_docling.image_processing_pil_granite_docling import (
    GraniteDoclingImageProcessorPil,
)
from transformers.models.granite_docling.processing_granite_docling import GraniteDoclingProcessor
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    Idefics3ImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from dsbd_ort.media.pictures import resized
from dsbd_runtime.media.given_picture import CanvasPicture, GivenPicture, TiledPicture
from tests.pictures.files import PAGES, STRIPS, drawn, random_sizes, values_of

ROWS = 4  # of a tile
SIZES = [(8, 8), (31, 33), (32, 32), (33, 32), (64, 64), (65, 20), (200, 150), (97, 300)]
WIDE = [*((side, side) for side in (8, 100, 511, 512, 513, 1000, 2048, 4097)), *PAGES]
MARKS = SimpleNamespace(
    fake_image_token="<fake_token_around_image>",
    global_image_tag="<global-img>",
    global_image_token="<global-img>",
    image_token="<image>",
    image_seq_len=ROWS,
)


def tiled(processor: Any, **changes: Any) -> TiledPicture:
    values = {
        **values_of(processor),
        "tile_size": processor.max_image_size["longest_edge"],
        "tile_rows": ROWS,
        "longest_edge": processor.size["longest_edge"],
    }
    return TiledPicture(**values | changes)


def canvas(processor: Any, **changes: Any) -> CanvasPicture:
    values = {
        **values_of(processor),
        "tile_size": processor.size["height"],
        "tile_rows": ROWS,
        "least_tiles": processor.min_patches,
        "most_tiles": processor.max_patches,
        "dense_most_tiles": processor.dense_max_patches,
        "dense_most_scale": processor.dense_max_scale,
        "dense_least_aspect": processor.dense_min_aspect,
        "dense_most_aspect": processor.dense_max_aspect,
    }
    return CanvasPicture(**values | changes)


def check(entry: GivenPicture, processor: Any, kind: Any, size: tuple[int, int]) -> None:
    """Compare with what a processor makes of noise of a size, and its text for that."""
    image = drawn(*size)
    extra = {} if isinstance(entry, CanvasPicture) else {"return_row_col_info": True}
    found = processor([image], return_tensors="np", **extra)
    pieces = entry.pieces(entry.resized(np.asarray(image), resized))
    assert np.array_equal(
        np.concatenate([piece.inputs["pixel_values"] for piece in pieces]), found["pixel_values"][0]
    )
    assert {piece.num_rows for piece in pieces} == {ROWS}
    text = entry.expansion(size, "<image>")
    assert text == kind.replace_image_token(MARKS, found, 0)
    assert text.count("<image>") == entry.num_rows(size) == ROWS * len(pieces)


@pytest.mark.parametrize("size", SIZES + STRIPS)
def test_tiles_of_idefics3(size: tuple[int, int]) -> None:
    sides = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}
    processor = Idefics3ImageProcessorPil(**sides)
    check(tiled(processor), processor, Idefics3Processor, size)
    processor = SmolVLMImageProcessorPil(**sides | {"size": {"longest_edge": 31}})
    check(tiled(processor), processor, SmolVLMProcessor, size)


class SizesAlone(Idefics3ImageProcessorPil):
    """A processor whose pictures have a size and no pixels of their own."""

    def resize(self, image: Any, size: Any, **unused: Any) -> Any:
        height, width = size.height, size.width
        if size.longest_edge:
            height, width = get_resize_output_image_size(image, size.longest_edge)
        return np.broadcast_to(np.uint8(0), (3, height, width))


@pytest.mark.parametrize("longest, tile", [(2048, 512), (4 * 364, 364), (4400, 900), (8192, 512)])
def test_layouts_of_many_sizes(longest: int, tile: int) -> None:
    """4,400 and 8,192: a picture is cut to 4,096 pixels before its sides are rounded up."""
    sides = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}
    processor = SizesAlone(**sides)
    for size in random_sizes():
        image = processor.resize(np.broadcast_to(np.uint8(0), (3, *size)), processor.size)
        image = processor.resize_for_vision_encoder(image, tile)
        _, *found = processor.split_images(image, {"longest_edge": tile})
        assert tiled(processor).layout(size) == tuple(found)


def test_canvases_of_many_sizes() -> None:
    processor = GraniteDoclingImageProcessorPil()
    for size in random_sizes()[:100]:
        assert canvas(processor).layout(size) == processor.get_tile_grid(*size)


@pytest.mark.parametrize("size", SIZES + STRIPS)
def test_tiles_of_granite_docling(size: tuple[int, int]) -> None:
    processor = GraniteDoclingImageProcessorPil(size={"height": 32, "width": 32})
    check(canvas(processor), processor, GraniteDoclingProcessor, size)
    processor.min_patches, processor.max_patches = 3, 9
    check(canvas(processor), processor, GraniteDoclingProcessor, size)
    processor.min_patches = processor.max_patches = 1
    check(canvas(processor), processor, GraniteDoclingProcessor, size)


DENSE = [
    {"dense_max_patches": 40, "dense_max_scale": 0.9},
    {"dense_max_patches": 40, "dense_min_aspect": 1.2},
    {
        "dense_max_patches": 2,
        "dense_max_scale": 0.9,
        "dense_min_aspect": 1.2,
        "dense_max_aspect": 2,
    },
    {"dense_max_patches": 40, "dense_max_aspect": 2.0},
]


@pytest.mark.parametrize("rule", range(len(DENSE)))
def test_layouts_of_dense_pictures(rule: int) -> None:
    processor = GraniteDoclingImageProcessorPil(
        size={"height": 32, "width": 32}, max_patches=8, **DENSE[rule]
    )
    layouts = set()
    for size in [*SIZES, *STRIPS, (200, 300), (300, 390), (600, 720), (600, 721), (500, 1000)]:
        layouts.add(found := canvas(processor).layout(size))
        assert found == processor.get_tile_grid(*size)
    assert len(layouts) > 4


def test_texts_have_the_lines_of_the_layout() -> None:
    processor = Idefics3ImageProcessorPil()
    entry = tiled(processor, tile_rows=1)
    assert entry.expansion((600, 1400), "P").startswith(
        "<fake_token_around_image><row_1_col_1>P<fake_token_around_image><row_1_col_2>P"
    )
    assert entry.expansion((600, 1400), "P").endswith(
        "<row_2_col_4>P\n\n<fake_token_around_image><global-img>P<fake_token_around_image>"
    )


@pytest.mark.long
@pytest.mark.parametrize("size", WIDE)
def test_all_sizes_with_the_numbers_of_checkpoints(size: tuple[int, int]) -> None:
    for longest, tile in ((2048, 512), (4 * 364, 364)):
        sides = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}
        processor = Idefics3ImageProcessorPil(**sides)
        check(tiled(processor), processor, Idefics3Processor, size)
    processor = GraniteDoclingImageProcessorPil()
    check(canvas(processor), processor, GraniteDoclingProcessor, size)
