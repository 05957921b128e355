"""Pictures as grids of patches, with three axes of positions: PaddleOCR-VL, Qwen3-VL.

The encoder's graph has one picture, whose squares of patches become one row each (docs/bundle.md).
Everything that depends on the size of the grid is an input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from dsbd_export.capture.forest_graph import Axis, Example
from dsbd_export.checkpoints.model_config import CheckpointFiles
from dsbd_export.given_prompt.media import Medium, side_by_side
from dsbd_export.given_prompt.picture_files import (
    BICUBIC,
    CLIP,
    check_alike,
    given_of,
    picture_settings,
    values_of_pixels,
)
from dsbd_export.given_prompt.whole_attention import attend_to_all
from dsbd_forward.rows import Ints
from dsbd_runtime.parts.given_grid import COORDS, PATCHES, GridPicture
from dsbd_runtime.parts.given_rows import GivenEntry
from dsbd_runtime.parts.part import FLOAT32, INT64

ValuesOf = Callable[[NDArray[np.float32], Ints], NDArray[np.float32]]

_DTYPES = {FLOAT32: torch.float32, INT64: torch.int64}
_AXES = 3
_SIDES = {"patch_size": ("patch_size", 14), "merge_size": ("spatial_merge_size", 2)}
_PIXELS = ("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")


def paddleocr_vl_entry(files: CheckpointFiles) -> GivenEntry:
    """See GivenKind."""
    vision = files.config.vision_config
    side = vision.image_size // vision.patch_size
    return _entry(files, "area-from-units", (384**2, 1536**2), positions_side=side)


def qwen3_vl_entry(files: CheckpointFiles) -> GivenEntry:
    """See GivenKind."""
    vision = files.config.vision_config
    return _entry(
        files,
        "area",
        (56**2, 28**2 * 1280),
        levels=len(vision.deepstack_visual_indexes),
        positions_side=math.isqrt(vision.num_position_embeddings),
        align_corners=True,
    )


def _entry(
    files: CheckpointFiles,
    sizing: str,
    pixels: tuple[int, int],
    *,
    levels: int = 0,
    **positions: Any,
) -> GivenEntry:
    """Return the entry; ``pixels``: least and most, where the files of pictures have none."""
    settings, vision = picture_settings(files), files.config.vision_config
    for name, (own, default) in _SIDES.items():
        check_alike(files, name, settings.get(name, default), getattr(vision, own))
    size = settings.get("size") or {}
    least, most = (
        settings.get(older) or size.get(name, default)
        for (older, name), default in zip(_PIXELS, pixels, strict=True)
    )
    picture = GridPicture(
        **values_of_pixels(settings, BICUBIC, CLIP),
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        sizing=sizing,
        least_pixels=least,
        most_pixels=most,
        **positions,
    )
    return given_of(files, picture, levels=levels, position_axes=_AXES)


def examples(given: GivenEntry) -> dict[str, Example]:
    """See GivenKind."""
    patches, specs = Axis("N", 12), given.medium.encoder_inputs
    return {
        name: Example((patches, cast(int, spec.shape[1])), _DTYPES[spec.type])
        for name, spec in specs.items()
    }


class PaddleOCRVLEncoder(nn.Module):
    """One picture to the embeddings of its rows."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vision, self.projector = model.model.visual.vision_model, model.model.projector
        attend_to_all(self.vision.config)

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return [(E, W)] of the inputs of ``examples``."""
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
    """One picture to the embeddings and levels of its rows, by the model's own forward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vision = model.model.visual
        attend_to_all(self.vision.config)

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return [(E, (1 + K) W)] of the inputs of ``examples``."""
        patches, coords, taps, tap_weights = tensors
        config = self.vision.config
        of_colors = patches.view(-1, config.in_channels, 1, config.patch_size**2)
        found = self.vision(
            of_colors.expand(-1, -1, config.temporal_patch_size, -1).flatten(1),
            grid_thw=None,
            position_ids=coords,
            interp_indices=taps,
            interp_weights=tap_weights,
            cu_seqlens=coords,  # nothing reads lengths
            max_seqlen=1,
        )
        return [torch.cat([found.pooler_output, *found.deepstack_features], dim=1)]


_GRIDS = {"page of lines": (3, 4), "white": (2, 5), "noise": (1, 1), "long noise": (16, 17)}
# rows of pictures of the gate: more than the 256 of one call, at the end


def gate_media(given: GivenEntry, values_of: ValuesOf) -> list[Medium]:
    """Return a page, white, noise, two pictures in a prompt, and a noise for several calls.

    values_of: returns what the model's own forward reads of patches and their coordinates.
    """
    picture, rng = given.medium, np.random.default_rng(5)
    assert isinstance(picture, GridPicture)  # as ``_entry`` returns
    size, merge = picture.patch_size, picture.merge_size
    lines = np.tile(np.where(np.arange(size**2) // size % 4 < 2, 1.0, -1.0), 3)
    media = []
    for name, (rows, columns) in _GRIDS.items():
        patches = rng.normal(size=(rows * columns * merge**2, len(lines)))
        if name == "white":
            patches = np.ones_like(patches)
        elif name == "page of lines":
            patches = np.where(patches[:, :1] < 0.5, lines, 1.0)
        piece = picture.piece(patches.astype(np.float32), rows * merge, columns * merge)
        values = torch.from_numpy(values_of(piece.inputs[PATCHES], piece.inputs[COORDS]))
        grid = torch.tensor([[1, rows * merge, columns * merge]])
        arguments = {"pixel_values": values, "image_grid_thw": grid}
        medium = Medium(name=name, pieces=[piece], arguments=arguments, grids=[(1, rows, columns)])
        media.append(medium)
    return [*media[:-1], side_by_side(media[:2], axis=0), media[-1]]


def by_rows(patches: NDArray[np.float32], coords: Ints) -> NDArray[np.float32]:
    """Return the patches of a picture row by row, as PaddleOCR-VL reads them, (N, 3, P, P)."""
    size = math.isqrt(patches.shape[1] // 3)
    in_order = patches[np.lexsort((coords[:, 1], coords[:, 0]))]
    return in_order.reshape(-1, 3, size, size)


def in_two_frames(patches: NDArray[np.float32], coords: Ints) -> NDArray[np.float32]:
    """Return the patches of a picture as those of two equal frames, as Qwen3-VL reads them."""
    frames = patches.reshape(len(coords), 3, 1, -1).repeat(2, axis=2)
    return frames.reshape(len(coords), -1)
