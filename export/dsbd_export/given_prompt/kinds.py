"""Kinds of models with given rows in their prompts: one row for each ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.model_config import CheckpointFiles
from dsbd_export.given_prompt import (
    encoders,
    granite_speech,
    grids,
    qwen3_asr,
    tiles,
    whisper_windows,
)
from dsbd_export.given_prompt.media import Medium
from dsbd_runtime.parts.given.given_medium import MediumEntry


@dataclass(frozen=True, kw_only=True)
class GivenKind:
    """One kind of model."""

    # reads the medium's entry from a checkpoint's files; ExportError if they are not supported
    entry: Callable[[CheckpointFiles], MediumEntry]
    # returns the module that is captured as the encoder; it maps a list of inputs to
    # [(E, (1 + K) W)]. The function may change the model, whose results are not needed any more.
    encoder: Callable[[Any], nn.Module]
    # returns media for the parity gate, given the entry: of several lengths, the last the longest
    media: Callable[[Any], list[Medium]]
    # returns the given rows of a medium by the model's own code, (E, (1 + K) W)
    own_rows: Callable[[Any, Mapping[str, Tensor]], Tensor] = encoders.own_rows
    # token that replaces a generated placeholder when it is read; None: the placeholder itself
    read_as: int | None = None
    # changes a loaded model, before anything else
    prepare: Callable[[Any, Checkpoint], None] = lambda *_: None
    # whether a checkpoint may have an adapter next to its weights; ``prepare`` merges it
    has_own_adapter: bool = False


_TILED = GivenKind(
    entry=tiles.tiled_picture,
    encoder=tiles.TileEncoder,
    media=tiles.gate_media,
)
_GRANITE_SPEECH = GivenKind(
    entry=granite_speech.sound_of,
    encoder=granite_speech.ConformerEncoder,
    media=granite_speech.gate_media,
    read_as=0,
    prepare=granite_speech.merge_own_adapter,
    has_own_adapter=True,
)

GIVEN_KINDS = {
    "glmasr": GivenKind(
        entry=whisper_windows.glmasr_sound,
        encoder=whisper_windows.WhisperWindowEncoder,
        media=partial(whisper_windows.gate_media, mask_name="input_features_mask"),
    ),
    "granite_docling": GivenKind(
        entry=tiles.canvas_picture,
        encoder=tiles.LevelledTileEncoder,
        media=partial(tiles.gate_media, with_mask=True),
    ),
    "granite_speech": _GRANITE_SPEECH,
    "granite_speech_plus": _GRANITE_SPEECH,
    "idefics3": _TILED,
    "paddleocr_vl": GivenKind(
        entry=grids.paddleocr_vl_picture,
        encoder=grids.PaddleOCRVLEncoder,
        media=partial(grids.gate_media, values_of=grids.by_rows),
    ),
    "qwen2_audio": GivenKind(
        entry=whisper_windows.qwen2_audio_sound,
        encoder=whisper_windows.MaskedWindowEncoder,
        media=partial(whisper_windows.gate_media, mask_name="feature_attention_mask"),
        own_rows=whisper_windows.own_rows_of_qwen2_audio,
        prepare=whisper_windows.choose_rows,
    ),
    "qwen3_asr": GivenKind(
        entry=qwen3_asr.sound_of,
        encoder=qwen3_asr.WindowEncoder,
        media=qwen3_asr.gate_media,
    ),
    "qwen3_vl": GivenKind(
        entry=grids.qwen3_vl_picture,
        encoder=grids.QwenVLEncoder,
        media=partial(grids.gate_media, values_of=grids.in_two_frames),
    ),
    "smolvlm": _TILED,
}
