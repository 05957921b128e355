"""Pictures as tiles of one size: Idefics3, SmolVLM, and GraniteDocling with levels.

The encoder's graph reads tiles; attention stays within a tile. A host passes tiles one after the
other (docs/bundle.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dsbd_export.checkpoints.model_config import CheckpointFiles
from dsbd_export.drawn_media import drawn_pictures
from dsbd_export.given_prompt.encoders import attend_to_all
from dsbd_export.given_prompt.media import CALL_ROWS, Medium, side_by_side
from dsbd_export.given_prompt.processor_files import (
    HALVES,
    LANCZOS,
    check_alike,
    picture_settings,
    values_of_pixels,
)
from dsbd_runtime.media.given_picture import PIXEL_VALUES, CanvasPicture, TiledPicture


def tiled_picture(files: CheckpointFiles) -> TiledPicture:
    """See GivenKind (Idefics3, SmolVLM)."""
    settings = picture_settings(files)
    tile_size = (settings.get("max_image_size") or {}).get("longest_edge", 364)
    return TiledPicture(
        **values_of_pixels(settings, LANCZOS, HALVES),
        **_tile(files, tile_size, files.config.scale_factor),
        longest_edge=(settings.get("size") or {}).get("longest_edge", 4 * 364),
    )


def canvas_picture(files: CheckpointFiles) -> CanvasPicture:
    """See GivenKind (GraniteDocling)."""
    settings = picture_settings(files)
    tile_size = (settings.get("size") or {}).get("height", 512)
    return CanvasPicture(
        **values_of_pixels(settings),
        **_tile(files, tile_size, files.config.vision_config.scale_factor),
        least_tiles=settings.get("min_patches", 1),
        most_tiles=settings.get("max_patches", 32),
        dense_most_tiles=settings.get("dense_max_patches", 0),
        dense_most_scale=settings.get("dense_max_scale", 0.0),
        dense_least_aspect=settings.get("dense_min_aspect", 0.0),
        dense_most_aspect=settings.get("dense_max_aspect", 0.0),
    )


def _tile(files: CheckpointFiles, tile_size: int, scale_factor: int) -> dict[str, Any]:
    """Return sizes of a tile; raise ExportError if the encoder reads tiles of another size."""
    vision = files.config.vision_config
    check_alike(files, "the size of a tile", tile_size, vision.image_size)
    side = vision.image_size // vision.patch_size // scale_factor
    return {"tile_size": tile_size, "tile_rows": side**2}


class TileEncoder(nn.Module):
    """Maps tiles to the embeddings of their rows (Idefics3, SmolVLM)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vision, self.connector = model.model.vision_model, model.model.connector
        attend_to_all(self.vision.config)
        self.register_buffer("positions", _positions_of_tile(self.vision.embeddings))

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return embeddings [(E, W)] for tiles (T, 3, H, W)."""
        [tiles] = tensors
        patches = self.vision.embeddings.patch_embedding(tiles).flatten(2).transpose(1, 2)
        states = patches + self.positions
        for layer in self.vision.encoder.layers:
            states = layer(states, None)
        return [self.connector(self.vision.post_layernorm(states)).flatten(0, 1)]


def _positions_of_tile(embeddings: Any) -> Tensor:
    """Return the position embeddings of a whole tile's patches, (1, N, width)."""
    outputs: list[Tensor] = []
    hook = embeddings.position_embedding.register_forward_hook(
        lambda _module, _inputs, output: outputs.append(output)
    )
    size, side = embeddings.image_size, embeddings.num_patches_per_side
    with torch.no_grad():
        embeddings(torch.zeros(1, 3, size, size), torch.ones(1, side, side, dtype=torch.bool))
    hook.remove()
    return outputs[0]


class LevelledTileEncoder(nn.Module):
    """Maps tiles to the embeddings and levels of their rows (GraniteDocling).

    The model's router would give some pages four times as many rows. It is not used, as by default
    in transformers: all pages have equally many rows.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vision = model.model.vision_model
        attend_to_all(self.vision.config)

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return embeddings and levels [(E, (1 + K) W)] for tiles (T, 3, H, W)."""
        states, of_levels = self.vision.encode(tensors[0])
        rows, levels = self.vision.connector(states, of_levels)
        return [torch.cat([rows, *levels], dim=1)]


def gate_media(picture: TiledPicture | CanvasPicture, *, with_mask: bool = False) -> list[Medium]:
    """Return a page, white, noise, two pictures in one prompt, and a large noise.

    The large noise needs several calls of an engine.

    with_mask: whether the model's own forward receives a mask of existing tiles.
    """
    size, media = (picture.tile_size, picture.tile_size), []
    numbers = (3, 1, 1, CALL_ROWS // picture.tile_rows + 1)
    for name, tiles in drawn_pictures(*((number, *size) for number in numbers)).items():
        pieces = picture.pieces(tiles)
        values = np.concatenate([piece.inputs[PIXEL_VALUES] for piece in pieces])
        arguments = {PIXEL_VALUES: torch.from_numpy(values)[None]}
        if with_mask:
            arguments["pixel_attention_mask"] = torch.ones(1, len(tiles), dtype=torch.bool)
        media.append(Medium(name=name, pieces=pieces, arguments=arguments))
    return [*media[:-1], side_by_side(media[:2], axis=1), media[-1]]
