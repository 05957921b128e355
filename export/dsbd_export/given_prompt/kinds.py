"""Kinds of models with given rows in their prompts: one row for each ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from dsbd_export.capture.forest_graph import Example
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.model_config import CheckpointFiles
from dsbd_export.given_prompt import granite_speech, grids, qwen3_asr, tiles, whisper_windows
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
    # the token that a generated placeholder is read as; None: itself
    read_as: int | None = None
    # changes a model that was loaded, before anything else
    prepare: Callable[[Any, Checkpoint], None] = lambda *_: None
    # whether checkpoints may have an adapter next to their weights, which ``prepare`` merges
    has_own_adapter: bool = False


_TILED = GivenKind(
    entry=tiles.tiled_entry,
    examples=tiles.examples,
    encoder=tiles.TileEncoder,
    media=tiles.gate_media,
    own_rows=own_rows,
)
_GRANITE_SPEECH = GivenKind(
    entry=granite_speech.given_entry,
    examples=granite_speech.examples,
    encoder=granite_speech.ConformerEncoder,
    media=granite_speech.gate_media,
    own_rows=granite_speech.own_rows,
    read_as=granite_speech.READ_AS,
    prepare=granite_speech.merge_own_adapter,
    has_own_adapter=True,
)

GIVEN_KINDS = {
    "glmasr": GivenKind(
        entry=whisper_windows.entry_of(
            whisper_windows.merged_of_glmasr, hides_padding=False, most_seconds=655
        ),
        examples=whisper_windows.examples,
        encoder=whisper_windows.WhisperWindowEncoder,
        media=whisper_windows.media_of("input_features_mask"),
        own_rows=whisper_windows.own_rows,
    ),
    "granite_docling": GivenKind(
        entry=tiles.canvas_entry,
        examples=tiles.examples,
        encoder=tiles.LevelledTileEncoder,
        media=partial(tiles.gate_media, with_mask=True),
        own_rows=own_rows,
    ),
    "granite_speech": _GRANITE_SPEECH,
    "granite_speech_plus": _GRANITE_SPEECH,
    "idefics3": _TILED,
    "paddleocr_vl": GivenKind(
        entry=grids.paddleocr_vl_entry,
        examples=grids.examples,
        encoder=grids.PaddleOCRVLEncoder,
        media=partial(grids.gate_media, values_of=grids.by_rows),
        own_rows=own_rows,
    ),
    "qwen2_audio": GivenKind(
        entry=whisper_windows.entry_of(lambda _: 2, hides_padding=True),
        examples=whisper_windows.examples,
        encoder=whisper_windows.MaskedWindowEncoder,
        media=whisper_windows.media_of("feature_attention_mask"),
        own_rows=whisper_windows.own_rows_of_qwen2_audio,
        prepare=whisper_windows.choose_rows,
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
