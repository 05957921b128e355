"""Qwen3-ASR: log-mel frames in chunks of one second, windows of eight that attend alone.

The encoder's graph has one window (docs/bundle.md): windows are independent, so a sound of any
length is computed window by window, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig

from dsbd_export.capture.forest_graph import Axis, Example
from dsbd_export.checkpoints.model_config import CheckpointFiles
from dsbd_export.errors import ExportError
from dsbd_export.given_prompt.media import Medium
from dsbd_export.given_prompt.sounds import extractor_settings, gate_features
from dsbd_export.given_prompt.whole_attention import attend_to_all
from dsbd_runtime.parts.encoder_entry import INPUT_FEATURES
from dsbd_runtime.parts.given_medium import KEPT_ROWS, ChunkedSound
from dsbd_runtime.parts.given_rows import GivenEntry

_SOUND = {  # by names of this package: transformers' names and defaults
    "sampling_rate": ("sampling_rate", 16_000),
    "n_fft": ("n_fft", 400),
    "hop_length": ("hop_length", 160),
    "least_samples": ("min_length", 8_000),
}


def given_entry(files: CheckpointFiles) -> GivenEntry:
    """Return the entry of a checkpoint; raise ExportError if it contradicts itself."""
    config = files.config
    for reason in _refusals(config):
        raise ExportError(f"the {files.role} at {files.folder} cannot be exported: {reason}")
    audio, text = config.audio_config, config.get_text_config()
    if audio.output_dim != text.hidden_size:
        raise ExportError(
            f"the encoder of the {files.role} at {files.folder} returns rows of {audio.output_dim} "
            f"numbers (audio_config.output_dim), its decoder reads {text.hidden_size}; check "
            "config.json"
        )
    settings = extractor_settings(files, audio.num_mel_bins)
    sound = ChunkedSound(
        num_mels=audio.num_mel_bins,
        chunk_frames=2 * audio.n_window,
        window_frames=audio.n_window_infer,
        **{ours: settings.get(name, default) for ours, (name, default) in _SOUND.items()},
    )
    return GivenEntry(
        placeholder_token_id=config.audio_token_id,
        width=text.hidden_size,
        levels=0,
        position_axes=1,
        medium=sound,
    )


def _refusals(config: PreTrainedConfig) -> Iterator[str]:
    """Yield why a checkpoint with this config is another model."""
    if hasattr(config, "thinker_config"):
        yield (
            "it is in the layout of Qwen's own library; give the one in transformers' layout, "
            "whose name ends in -hf"
        )
    if any("TokenClassification" in name for name in config.architectures or ()):
        yield "it aligns texts to sounds, and writes no text; choose another checkpoint"


def examples(given: GivenEntry) -> dict[str, Example]:
    """See GivenKind."""
    sound = _sound_of(given)
    features = Example((Axis("T", 3), sound.num_mels, sound.chunk_frames), torch.float32)
    return {INPUT_FEATURES: features, KEPT_ROWS: Example((Axis("E", 7),))}


class WindowEncoder(nn.Module):
    """One window of sound to the embeddings of its rows."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tower, self.projector = model.model.audio_tower, model.model.multi_modal_projector
        attend_to_all(self.tower.config)

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return [(E, W)] of chunks (T, mels, F) and the rows (E,) of them that are kept."""
        chunks, kept_rows = tensors
        tower = self.tower
        states = chunks[:, None]
        for convolution in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
            states = F.gelu(convolution(states))  # (T, channels, mels / 8, F / 8)
        states = tower.conv_out(states.permute(0, 3, 1, 2).flatten(2))
        states = states + tower.positional_embedding.positional_embedding[: states.shape[1]]
        states = states.flatten(0, 1).index_select(0, kept_rows)
        for layer in tower.layers:
            states = layer(states, None, max_seqlen=1)[0]  # lengths that nothing reads
        return [self.projector(tower.ln_post(states))]


def own_rows(model: Any, arguments: Mapping[str, Tensor]) -> Tensor:
    """See GivenKind."""
    rows: Tensor = model.get_audio_features(**arguments, return_dict=True).pooler_output
    return rows


_CALL_ROWS = 256  # of an engine: the longest sound reaches into a second call
_SHORT_FRAMES = 37


def gate_media(given: GivenEntry) -> list[Medium]:
    """Return a short noise, tones over a window's end, silence, and a noise for several calls."""
    sound = _sound_of(given)
    window, second = sound.window_frames, sound.chunk_frames
    num_long = _CALL_ROWS * second // sound.num_rows(second) + _SHORT_FRAMES
    found = gate_features(sound.num_mels, _SHORT_FRAMES, window + _SHORT_FRAMES, num_long)
    return [_medium(name, sound, features) for name, features in found.items()]


def _medium(name: str, sound: ChunkedSound, features: NDArray[np.float32]) -> Medium:
    num_frames = features.shape[1]
    padding = -num_frames % sound.chunk_frames
    padded = torch.from_numpy(np.pad(features, ((0, 0), (0, padding))))[None]
    is_frame = torch.arange(padded.shape[2])[None] < num_frames
    arguments = {INPUT_FEATURES: padded, f"{INPUT_FEATURES}_mask": is_frame.to(torch.int64)}
    return Medium(name=name, pieces=sound.pieces(features), arguments=arguments)


def _sound_of(given: GivenEntry) -> ChunkedSound:
    assert isinstance(given.medium, ChunkedSound)  # as ``given_entry`` returns
    return given.medium
