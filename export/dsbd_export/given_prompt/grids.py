"""Pictures as grids of patches, with three axes of positions: PaddleOCR-VL, Qwen3-VL.

The encoder's graph reads one picture. Each square of patches becomes one row (docs/bundle.md).
Everything that depends on the size of the grid is an input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from dsbd_export.checkpoints.model_config import CheckpointFiles
from dsbd_export.drawn_media import drawn_pictures
from dsbd_export.given_prompt.encoders import attend_to_all
from dsbd_export.given_prompt.media import Medium, side_by_side
from dsbd_export.given_prompt.processor_files import check_alike, picture_settings, values_of_pixels
from dsbd_forward.rows import Ints
from dsbd_runtime.media.given_grid import COORDS, PATCHES, GridPicture

ValuesOf = Callable[[NDArray[np.float32], Ints], NDArray[np.float32]]


def paddleocr_vl_picture(files: CheckpointFiles) -> GridPicture:
    """See GivenKind."""
    vision = files.config.vision_config
    side = vision.image_size // vision.patch_size
    return _picture(files, "area-from-units", (384**2, 1536**2), positions_side=side)


def qwen3_vl_picture(files: CheckpointFiles) -> GridPicture:
    """See GivenKind."""
    side = math.isqrt(files.config.vision_config.num_position_embeddings)
    pixels = (56**2, 28**2 * 1280)
    return _picture(files, "area", pixels, positions_side=side, align_corners=True)


def _picture(
    files: CheckpointFiles, sizing: str, pixels: tuple[int, int], **positions: Any
) -> GridPicture:
    """Return the entry; ``pixels``: default minimum and maximum, if the files have none."""
    settings, vision = picture_settings(files), files.config.vision_config
    check_alike(files, "patch_size", settings.get("patch_size", 14), vision.patch_size)
    check_alike(files, "merge_size", settings.get("merge_size", 2), vision.spatial_merge_size)
    size, (min_pixels, max_pixels) = settings.get("size") or {}, pixels
    return GridPicture(
        **values_of_pixels(settings),
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        sizing=sizing,
        least_pixels=settings.get("min_pixels") or size.get("shortest_edge", min_pixels),
        most_pixels=settings.get("max_pixels") or size.get("longest_edge", max_pixels),
        **positions,
    )


class PaddleOCRVLEncoder(nn.Module):
    """Maps one picture to the embeddings of its rows."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vision, self.projector = model.model.visual.vision_model, model.model.projector
        attend_to_all(self.vision.config)

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return embeddings [(E, W)] for the inputs of ``GridPicture``."""
        patches, coords, taps, tap_weights = tensors
        embeddings, projector = self.vision.embeddings, self.projector
        of_patch = embeddings.patch_embedding
        states = F.linear(patches, of_patch.weight.flatten(1), of_patch.bias)
        states = states + (embeddings.position_embedding(taps) * tap_weights[:, :, None]).sum(1)
        angles = self.vision.encoder.rotary_pos_emb(states, coords)
        for layer in self.vision.encoder.layers:  # nothing reads lengths
            states = layer(states, cu_seqlens=coords, max_seqlen=1, position_embeddings=angles)
        states = projector.pre_norm(self.vision.post_layernorm(states))
        squares = states.view(-1, projector.linear_1.in_features)
        return [projector.linear_2(projector.act(projector.linear_1(squares)))]


class QwenVLEncoder(nn.Module):
    """Maps one picture to the embeddings and levels of its rows, by the model's own forward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vision = model.model.visual
        attend_to_all(self.vision.config)

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return embeddings and levels [(E, (1 + K) W)] for the inputs of ``GridPicture``."""
        patches, coords, taps, tap_weights = tensors
        config = self.vision.config
        of_colors = patches.view(-1, config.in_channels, 1, config.patch_size**2)
        output = self.vision(
            of_colors.expand(-1, -1, config.temporal_patch_size, -1).flatten(1),
            grid_thw=None,
            position_ids=coords,
            interp_indices=taps,
            interp_weights=tap_weights,
            cu_seqlens=coords,  # nothing reads lengths
            max_seqlen=1,
        )
        return [torch.cat([output.pooler_output, *output.deepstack_features], dim=1)]


_GRIDS = (
    (3, 4),
    (2, 5),
    (1, 1),
    (16, 17),
)  # grids of rows of the pictures; the last has more than CALL_ROWS rows


def gate_media(picture: GridPicture, values_of: ValuesOf) -> list[Medium]:
    """Return a page, white, noise, two pictures in one prompt, and a large noise.

    The large noise needs several calls of an engine.

    values_of: returns the pixel values that the model's own forward reads, from patches and their
        coordinates.
    """
    unit, merge, media = picture.unit, picture.merge_size, []
    drawn = drawn_pictures(*((rows * unit, columns * unit) for rows, columns in _GRIDS))
    for (name, pixels), (rows, columns) in zip(drawn.items(), _GRIDS, strict=True):
        [piece] = pieces = picture.pieces(pixels)
        values = torch.from_numpy(values_of(piece.inputs[PATCHES], piece.inputs[COORDS]))
        grid = torch.tensor([[1, rows * merge, columns * merge]])
        arguments = {"pixel_values": values, "image_grid_thw": grid}
        media.append(
            Medium(name=name, pieces=pieces, arguments=arguments, grids=[(1, rows, columns)])
        )
    return [*media[:-1], side_by_side(media[:2], axis=0), media[-1]]


def by_rows(patches: NDArray[np.float32], coords: Ints) -> NDArray[np.float32]:
    """Return a picture's patches row by row, (N, 3, P, P), as PaddleOCR-VL reads them."""
    size = math.isqrt(patches.shape[1] // 3)
    in_order = patches[np.lexsort((coords[:, 1], coords[:, 0]))]
    return in_order.reshape(-1, 3, size, size)


def in_two_frames(patches: NDArray[np.float32], coords: Ints) -> NDArray[np.float32]:
    """Return a picture's patches as two equal frames, as Qwen3-VL reads them."""
    frames = patches.reshape(len(coords), 3, 1, -1).repeat(2, axis=2)
    return frames.reshape(len(coords), -1)
