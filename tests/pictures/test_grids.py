"""Grids against transformers' processors and models: sizes, patches, taps and positions."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.paddleocr_vl.modeling_paddleocr_vl import PaddleOCRVLModel
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from dsbd_ort.media.pictures import resized
from dsbd_runtime.errors import InputError
from dsbd_runtime.media.given_grid import GridPicture, mrope_positions
from dsbd_runtime.parts.given.given_prompt import GivenPiece, GivenPrompt
from tests.pictures.files import PAGES, STRIPS, drawn, random_sizes, values_of

SIZES = [(8, 8), (28, 28), (27, 29), (5, 900), (120, 90), (200, 301)]
WIDE = [*((side, side) for side in (8, 100, 384, 1000, 1536, 2048, 5000)), *PAGES]
PLACEHOLDER = 9
MERGE = 2


def processor_and_entry(kind: str, least: int | None = None, most: int | None = None) -> Any:
    """Return a processor of transformers, and the entry that an export makes of its numbers."""
    made, sizing, positions = {
        "qwen3_vl": (partial(Qwen2VLImageProcessorPil, patch_size=16), "area", (48, True)),
        "paddleocr_vl": (PaddleOCRVLImageProcessorPil, "area-from-units", (27, False)),
    }[kind]
    size = {"size": {"shortest_edge": least, "longest_edge": most}} if most else {}
    processor = made(**size)
    entry = GridPicture(
        **values_of(processor),
        patch_size=processor.patch_size,
        merge_size=processor.merge_size,
        sizing=sizing,
        least_pixels=processor.size["shortest_edge"],
        most_pixels=processor.size["longest_edge"],
        positions_side=positions[0],
        align_corners=positions[1],
    )
    return processor, entry


def check(kind: str, size: tuple[int, int], *limits: int) -> None:
    """Compare with what a processor makes of noise of a size."""
    processor, entry = processor_and_entry(kind, *limits)
    image = drawn(*size)
    found = processor([image], return_tensors="np", input_data_format="channels_last")
    [piece] = entry.pieces(entry.resized(np.asarray(image), resized))
    patches, coords = piece.inputs["patches"], piece.inputs["coords"]
    if kind == "paddleocr_vl":  # row by row of the whole picture
        patches = patches[np.lexsort((coords[:, 1], coords[:, 0]))]
    frames = found["pixel_values"].reshape(len(patches), 3, -1, entry.patch_size**2)
    for frame in range(frames.shape[2]):
        assert np.array_equal(frames[:, :, frame].reshape(patches.shape), patches)
    [[time, height, width]] = grid = found["image_grid_thw"]
    assert entry.grid(size) == (time, height // MERGE, width // MERGE)
    assert np.array_equal(coords, get_vision_position_ids(torch.tensor(grid), MERGE).numpy())
    replaced = Qwen3VLProcessor if kind == "qwen3_vl" else PaddleOCRVLProcessor
    owner = SimpleNamespace(image_processor=processor, image_token="<image>")
    assert entry.expansion(size, "<image>") == replaced.replace_image_token(owner, found, 0)
    assert entry.num_rows(size) == piece.num_rows == len(patches) // MERGE**2


KINDS = ["qwen3_vl", "paddleocr_vl"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES + STRIPS)
def test_patches(kind: str, size: tuple[int, int]) -> None:
    check(kind, size, 60 * 60, 150 * 150)


@pytest.mark.parametrize("kind", KINDS)
def test_grids_of_many_sizes(kind: str) -> None:
    for limits in ((), (56 * 56, 300 * 300)):
        processor, entry = processor_and_entry(kind, *limits)
        for size in random_sizes():
            num_patches = processor.get_number_of_image_patches(*size)
            assert entry.num_rows(size) * MERGE**2 == num_patches


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grid", [(2, 2), (4, 6), (54, 8), (96, 100), (400, 2)])
def test_taps_into_learned_positions(kind: str, grid: tuple[int, int]) -> None:
    """Equal to the bit, in the order of squares for both kinds."""
    _, entry = processor_and_entry(kind)
    piece = entry.piece(np.zeros((grid[0] * grid[1], 1), np.float32), *grid)
    taps, weights = get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, *grid]]),
        entry.positions_side,
        align_corners=entry.align_corners,
        spatial_merge_size=MERGE,
    )
    assert np.array_equal(piece.inputs["taps"], taps.numpy())
    assert np.array_equal(piece.inputs["tap_weights"], weights.numpy())


def with_four(entry: GridPicture) -> GridPicture:
    return replace(entry, positions_side=4)


def test_taps_of_the_docstring() -> None:
    _, entry = processor_and_entry("paddleocr_vl")
    taps, weights = with_four(entry)._taps(np.arange(2), 2)
    assert taps.tolist() == [[0, 1], [2, 3]] and weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    _, entry = processor_and_entry("qwen3_vl")
    taps, weights = with_four(entry)._taps(np.arange(2), 2)
    assert taps.tolist() == [[0, 1], [3, 3]] and weights.tolist() == [[1, 0], [1, 0]]
    taps, weights = with_four(entry)._taps(np.arange(1), 1)  # of squares of one patch
    assert taps.tolist() == [[0, 1]] and weights.tolist() == [[1, 0]]


def reference_positions(model: Any, token_ids: list[int], grids: list[Any]) -> np.ndarray:
    """Return get_rope_index of a model class, without a model, up to the last row of a picture."""
    owner = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace()))
    owner.config.vision_config.spatial_merge_size = MERGE
    owner.get_vision_position_ids = partial(model.get_vision_position_ids, owner)
    ids = torch.tensor([token_ids])
    is_picture = (ids == PLACEHOLDER).int()
    patches = torch.tensor([[t, h * MERGE, w * MERGE] for t, h, w in grids])
    found, delta = model.get_rope_index(owner, ids, is_picture, image_grid_thw=patches)
    own = mrope_positions(token_ids, PLACEHOLDER, grids)
    pieces = [GivenPiece({"n": np.array(n)}, h * w) for n, (_, h, w) in enumerate(grids)]
    places = (np.array(token_ids) == PLACEHOLDER).nonzero()[0]
    prompt = GivenPrompt(places, pieces, own)
    assert int(delta) == int(prompt.on_axes(np.array([len(token_ids)]), 3)[0, 0]) - len(token_ids)
    assert np.array_equal(prompt.on_axes(np.arange(len(token_ids)), 3), found[:, 0].numpy())
    return found[:, 0, : own.shape[1]].numpy()


@pytest.mark.parametrize("model", [Qwen3VLModel, PaddleOCRVLModel])
def test_positions_are_those_of_the_model(model: Any) -> None:
    for grids in ([(1, 2, 3)], [(1, 1, 1)], [(1, 4, 2), (1, 1, 5)], [(1, 7, 1), (1, 2, 2)]):
        for num_text in (0, 1, 6):
            token_ids = list(range(num_text))
            for _, height, width in grids:
                token_ids += [PLACEHOLDER] * (height * width) + [1, 2]
            expected = reference_positions(model, token_ids, grids)
            found = mrope_positions(token_ids, PLACEHOLDER, grids)
            assert found.dtype == np.int64 and np.array_equal(found, expected)


def test_positions_of_the_docstring() -> None:
    found = mrope_positions([7, PLACEHOLDER, PLACEHOLDER, 8], PLACEHOLDER, [(1, 1, 2)])
    assert found.tolist() == [[0, 1, 1], [0, 1, 1], [0, 1, 2]]


def test_positions_of_other_prompts_are_refused() -> None:
    with pytest.raises(InputError, match="1 placeholders, expected 2, one for each row of 1 pict"):
        mrope_positions([7, PLACEHOLDER], PLACEHOLDER, [(1, 1, 2)])
    with pytest.raises(InputError, match="has text between the rows of a picture"):
        mrope_positions([PLACEHOLDER, 7, PLACEHOLDER], PLACEHOLDER, [(1, 1, 2)])


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", WIDE)
def test_all_sizes_with_the_numbers_of_checkpoints(kind: str, size: tuple[int, int]) -> None:
    check(kind, size)
