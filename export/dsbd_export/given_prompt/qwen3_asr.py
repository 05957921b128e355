"""Qwen3-ASR: log-mel frames in chunks of one second; eight chunks are a window.

Attention stays within a window. The encoder's graph therefore has one window (docs/bundle.md), and
a sound of any length is computed exactly, window by window.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsbd_export.checkpoints.model_config import CheckpointFiles
from dsbd_export.drawn_media import drawn_features
from dsbd_export.given_prompt.encoders import attend_to_all
from dsbd_export.given_prompt.media import CALL_ROWS, Medium
from dsbd_export.given_prompt.processor_files import refused, sound_settings
from dsbd_runtime.media.given_sound import ChunkedSound
from dsbd_runtime.parts.source.encoder_entry import INPUT_FEATURES


def sound_of(files: CheckpointFiles) -> ChunkedSound:
    """Return the entry of a checkpoint; raise ExportError if its files contradict each other."""
    config, audio = files.config, files.config.audio_config
    if hasattr(config, "thinker_config"):
        raise refused(
            files,
            "it is in the layout of Qwen's own library; give the one in transformers' layout, "
            "whose name ends in -hf",
        )
    if audio.output_dim != (width := config.get_text_config().hidden_size):
        raise refused(
            files,
            f"its encoder returns rows of {audio.output_dim} numbers (audio_config.output_dim), "
            f"its decoder reads {width}; check config.json",
        )
    settings = sound_settings(files, "feature_size", audio.num_mel_bins, min_length=8_000)
    return ChunkedSound(
        sampling_rate=settings["sampling_rate"],
        num_mels=audio.num_mel_bins,
        n_fft=settings["n_fft"],
        hop_length=settings["hop_length"],
        chunk_frames=2 * audio.n_window,
        window_frames=audio.n_window_infer,
        least_samples=settings["min_length"],
    )


class WindowEncoder(nn.Module):
    """Maps one window of sound to the embeddings of its rows."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tower, self.projector = model.model.audio_tower, model.model.multi_modal_projector
        attend_to_all(self.tower.config)

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return embeddings [(E, W)] for chunks (T, mels, F) and the numbers (E,) of kept rows."""
        chunks, kept_rows = tensors
        tower = self.tower
        states = chunks[:, None]
        for convolution in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
            states = F.gelu(convolution(states))  # (T, channels, mels / 8, F / 8)
        states = tower.conv_out(states.permute(0, 3, 1, 2).flatten(2))
        states = states + tower.positional_embedding.positional_embedding[: states.shape[1]]
        states = states.flatten(0, 1).index_select(0, kept_rows)
        for layer in tower.layers:
            states = layer(states, None, max_seqlen=1)[0]  # nothing reads lengths
        return [self.projector(tower.ln_post(states))]


_SHORT_FRAMES = 37


def gate_media(sound: ChunkedSound) -> list[Medium]:
    """Return a short noise, tones across the end of a window, silence, and a long noise."""
    window, second = sound.window_frames, sound.chunk_frames
    num_long = CALL_ROWS * second // sound.num_rows(second) + _SHORT_FRAMES
    tones = window + _SHORT_FRAMES
    drawn = drawn_features(sound.num_mels, _SHORT_FRAMES, tones, tones // 2, num_long)
    media = []
    for name, features in drawn.items():
        num_frames = features.shape[1]
        padded = np.pad(features, ((0, 0), (0, -num_frames % second)))
        is_frame = np.arange(padded.shape[1]) < num_frames
        arguments = {
            INPUT_FEATURES: torch.from_numpy(padded)[None],
            f"{INPUT_FEATURES}_mask": torch.from_numpy(is_frame.astype(np.int64))[None],
        }
        media.append(Medium(name=name, pieces=sound.pieces(features), arguments=arguments))
    return media
