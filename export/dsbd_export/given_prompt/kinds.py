"""Kinds of models with given rows in their prompts: one row for each ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from dsbd_export.capture.forest_graph import Example
from dsbd_export.checkpoints.model_config import CheckpointFiles
from dsbd_export.given_prompt import grids, qwen3_asr, tiles
from dsbd_export.given_prompt.media import Medium
from dsbd_export.given_prompt.picture_files import own_rows
from dsbd_runtime.parts.given_rows import GivenEntry


@dataclass(frozen=True, kw_only=True)
class GivenKind:
    """One kind of model."""

    # reads the entry from the files of a checkpoint; raises ExportError for unsupported ones
    entry: Callable[[CheckpointFiles], GivenEntry]
    # an example of each input of the encoder's graph by name
    examples: Callable[[GivenEntry], Mapping[str, Example]]
    # returns the module that is captured as the encoder: a list of its inputs to [(E, (1 + K) W)].
    # It may change the model, whose own results are not needed any more.
    encoder: Callable[[Any], nn.Module]
    # returns what the parity gate compares: of several lengths, the last the longest
    media: Callable[[GivenEntry], list[Medium]]
    # returns the given rows of a medium by the model's own code, (E, (1 + K) W)
    own_rows: Callable[[Any, Mapping[str, Tensor]], Tensor]


_TILED = GivenKind(
    entry=tiles.tiled_entry,
    examples=tiles.examples,
    encoder=tiles.TileEncoder,
    media=tiles.gate_media,
    own_rows=own_rows,
)
GIVEN_KINDS = {
    "granite_docling": GivenKind(
        entry=tiles.canvas_entry,
        examples=tiles.examples,
        encoder=tiles.LevelledTileEncoder,
        media=partial(tiles.gate_media, with_mask=True),
        own_rows=own_rows,
    ),
    "idefics3": _TILED,
    "paddleocr_vl": GivenKind(
        entry=grids.paddleocr_vl_entry,
        examples=grids.examples,
        encoder=grids.PaddleOCRVLEncoder,
        media=partial(grids.gate_media, values_of=grids.by_rows),
        own_rows=own_rows,
    ),
    "qwen3_asr": GivenKind(
        entry=qwen3_asr.given_entry,
        examples=qwen3_asr.examples,
        encoder=qwen3_asr.WindowEncoder,
        media=qwen3_asr.gate_media,
        own_rows=qwen3_asr.own_rows,
    ),
    "qwen3_vl": GivenKind(
        entry=grids.qwen3_vl_entry,
        examples=grids.examples,
        encoder=grids.QwenVLEncoder,
        media=partial(grids.gate_media, values_of=grids.in_two_frames),
        own_rows=own_rows,
    ),
    "smolvlm": _TILED,
}
