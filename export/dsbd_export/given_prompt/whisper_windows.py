"""Kinds that read Whisper's windows: GLM-ASR and Qwen2-Audio.

Each window of 30 s is encoded alone, including padding. Rows that are not padding are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.model_config import CheckpointFiles
from dsbd_export.drawn_media import drawn_features
from dsbd_export.given_prompt.encoders import attend_to_all
from dsbd_export.given_prompt.media import Medium
from dsbd_export.given_prompt.processor_files import sound_settings
from dsbd_runtime.media.given_sound import WindowedSound
from dsbd_runtime.parts.source.encoder_entry import INPUT_FEATURES

_MOST_SECONDS = 655  # transformers' limit for GLM-ASR


def glmasr_sound(files: CheckpointFiles) -> WindowedSound:
    """See GivenKind."""
    audio = files.config.audio_config
    merged = (
        audio.intermediate_size // audio.hidden_size
    )  # positions that the projector merges into one row
    return _sound(files, merged, hides_padding=False, most_seconds=_MOST_SECONDS)


def qwen2_audio_sound(files: CheckpointFiles) -> WindowedSound:
    """See GivenKind: one window."""
    return _sound(files, 2, hides_padding=True, most_seconds=0)


def _sound(
    files: CheckpointFiles, merged: int, *, hides_padding: bool, most_seconds: int
) -> WindowedSound:
    num_mels = files.config.audio_config.num_mel_bins
    settings = sound_settings(files, "feature_size", num_mels, chunk_length=30)
    seconds, rate = settings["chunk_length"], settings["sampling_rate"]
    return WindowedSound(
        recipe=files.config.model_type,
        sampling_rate=rate,
        num_mels=num_mels,
        n_fft=settings["n_fft"],
        hop_length=settings["hop_length"],
        num_frames=seconds * rate // settings["hop_length"],
        merged=merged,
        hides_padding=hides_padding,
        most_windows=max(most_seconds // seconds, 1),
    )


class WhisperWindowEncoder(nn.Module):
    """Maps one window of sound to the embeddings of its rows without padding."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tower, self.projector = model.model.audio_tower, model.model.multi_modal_projector
        attend_to_all(self.tower.config)

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return embeddings [(E, W)] for the inputs of ``WindowedSound``."""
        features, kept_rows, *masks = tensors
        states = self.encoded(features[None], *masks)
        return [self.projector(states).index_select(0, kept_rows)]

    def encoded(self, features: Tensor, *masks: Tensor) -> Tensor:
        """Return the projector's input for GLM-ASR, (rows of the window, D)."""
        states: Tensor = self.tower(features, return_dict=True).last_hidden_state
        return states.reshape(-1, self.projector.linear_1.in_features)


class MaskedWindowEncoder(WhisperWindowEncoder):
    """Encoder of Qwen2-Audio: Whisper's with a mask; each row is the mean of two positions."""

    def encoded(self, features: Tensor, *masks: Tensor) -> Tensor:
        tower, [is_frame] = self.tower, masks
        states = F.gelu(tower.conv2(F.gelu(tower.conv1(features)))).permute(0, 2, 1)
        states = states + tower.embed_positions.weight
        mask = is_frame[::2].reshape(1, 1, 1, -1).expand(1, 1, states.shape[1], -1)
        for layer in tower.layers:
            states = layer(states, mask)
        pooled = tower.avg_pooler(states.permute(0, 2, 1)).permute(0, 2, 1)
        normed: Tensor = tower.layer_norm(pooled)[0]
        return normed


def own_rows_of_qwen2_audio(model: Any, arguments: Mapping[str, Tensor]) -> Tensor:
    """See GivenKind.

    No method of this model class returns the encoder's rows, so they are taken from the input of
    its language model, at the placeholders.
    """
    embeddings: list[Tensor] = []
    num_rows = (int(arguments["feature_attention_mask"].sum()) + 1) // 2 // 2
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _, __, given: embeddings.append(given["inputs_embeds"]), with_kwargs=True
    )
    try:
        ids = torch.full((1, num_rows), model.config.audio_token_id)
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **arguments)
    finally:
        hook.remove()
    return embeddings[0][0]


def choose_rows(model: Any, _: Checkpoint) -> None:
    """Make a Qwen2-Audio model support ``logits_to_keep``, like other models of transformers."""
    rows: list[Any] = []

    def begin(_: nn.Module, __: Any, given: dict[str, Any]) -> None:
        kept = given.pop("logits_to_keep", 0)
        rows[:] = [slice(-kept, None) if isinstance(kept, int) else kept]

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        output.last_hidden_state = output.last_hidden_state[:, rows[0]]

    model.register_forward_pre_hook(begin, with_kwargs=True)
    model.model.register_forward_hook(
        keep
    )  # a hook of the head would be lost: drafts may replace the head


def gate_media(sound: WindowedSound, mask_name: str) -> list[Medium]:
    """Return a few rows, tones in part of a window, silence, and a noise as long as possible.

    mask_name: argument of the model's own forward that marks frames without padding.
    """
    size, row = sound.num_frames, 2 * sound.merged
    longest = size if sound.most_windows == 1 else size + 2 * row
    drawn = drawn_features(sound.num_mels, 3 * row + 1, size // 2, size // 4, longest)
    media = []
    for name, features in drawn.items():
        num_frames = features.shape[1]
        padded = np.pad(features, ((0, 0), (0, -num_frames % size)), constant_values=-1.0)
        windows = padded.reshape(sound.num_mels, -1, size).transpose(1, 0, 2)
        is_frame = np.arange(padded.shape[1]).reshape(-1, size) < num_frames
        arguments = {
            INPUT_FEATURES: torch.from_numpy(windows.copy()),
            mask_name: torch.from_numpy(is_frame.astype(np.int64)),
        }
        pieces = sound.pieces(padded, num_frames)
        media.append(Medium(name=name, pieces=pieces, arguments=arguments))
    return media
