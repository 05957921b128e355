"""Granite Speech: a conformer over the whole sound, a Q-Former over windows of it, a CTC head.

The CTC head transcribes the sound by characters; its text is a draft for the language model's text.
Older checkpoints have an adapter (LoRA) for prompts with sound. It is merged, because a bundle is
for sound.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.utils.save_and_load import load_peft_weights
from torch import Tensor, nn

from dsbd_export.checkpoints.adapter import read_adapter
from dsbd_export.checkpoints.adapter_files import BY_HAND, CONFIG_FILE
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.checkpoint_files import json_object_or_none
from dsbd_export.checkpoints.model_config import CheckpointFiles
from dsbd_export.drawn_media import drawn_features
from dsbd_export.errors import ExportError
from dsbd_export.given_prompt.encoders import attend_to_all, attended
from dsbd_export.given_prompt.media import CALL_ROWS, Medium
from dsbd_export.given_prompt.processor_files import refused, sound_settings
from dsbd_runtime.media.given_sound import StackedSound
from dsbd_runtime.parts.source.encoder_entry import INPUT_FEATURES

_NOT_USED: tuple[object, ...] = (None, False, "none", {})
_PLAIN = {  # settings of an adapter that only adds products of two matrices, all of one rank
    "peft_type": ("LORA",),
    "use_dora": _NOT_USED,
    "bias": _NOT_USED,
    "rank_pattern": _NOT_USED,
    "alpha_pattern": _NOT_USED,
    "modules_to_save": _NOT_USED,
}
_LEAST_CHARACTERS = 256  # of a head for Latin-1; the characters of smaller heads are not published
_HIDDEN = -3e4  # added to the scores of padding


def sound_of(files: CheckpointFiles) -> StackedSound:
    """Return the entry of a checkpoint; raise ExportError if its files contradict each other."""
    config = files.config
    if config.has_lora_adapter and not (files.folder / CONFIG_FILE).is_file():
        raise refused(
            files,
            f"it has no adapter ({CONFIG_FILE}), but its config.json says so (has_lora_adapter); "
            "copy it from the checkpoint",
        )
    encoder, num_mels = config.encoder_config, config.encoder_config.input_dim // 2
    settings = sound_settings(files, "n_mels", num_mels, n_fft=512, win_length=400)
    spells = encoder.output_dim >= _LEAST_CHARACTERS
    return StackedSound(
        recipe=config.model_type,
        sampling_rate=settings["sampling_rate"],
        num_mels=num_mels,
        n_fft=settings["n_fft"],
        window_length=settings["win_length"],
        hop_length=settings["hop_length"],
        block_pairs=encoder.context_size,
        window_pairs=config.window_size,
        window_rows=config.window_size // config.downsample_rate,
        num_characters=encoder.output_dim if spells else 0,
    )


def merge_own_adapter(model: Any, checkpoint: Checkpoint) -> None:
    """Merge the adapter (LoRA) next to a checkpoint's weights, if any, into its language model."""
    folder = checkpoint.folder
    if not (folder / CONFIG_FILE).is_file():
        return
    read_adapter(str(folder), folder)  # checks it
    settings = json_object_or_none(folder / CONFIG_FILE) or {}
    if others := [name for name, plain in _PLAIN.items() if settings.get(name) not in plain]:
        raise ExportError(
            f"the adapter at {folder} has {others[0]}, expected a plain LoRA; {BY_HAND}"
        )
    rank = settings["r"]
    scale = settings["lora_alpha"] / (rank**0.5 if settings.get("use_rslora") else rank)
    weights = load_peft_weights(str(folder), device="cpu")
    layers = model.get_decoder().layers
    while weights:
        name = next(iter(weights))
        # The names of modules before the path in a layer depend on transformers' version.
        path = name.partition("language_model.")[2].partition("layers.")[2]
        path = path.removesuffix(".lora_A.weight").removesuffix(".lora_B.weight")
        pair = [name.rpartition(".lora_")[0] + f".lora_{letter}.weight" for letter in "AB"]
        try:
            first, second = (weights.pop(each).float() for each in pair)
            weight = layers.get_submodule(path).weight
            weight.data.add_((scale * (second @ first)).to(weight.dtype))
        except (AttributeError, KeyError, RuntimeError) as error:
            raise ExportError(
                f"the adapter at {folder} has the weight {name}, which does not fit the language "
                f"model of the checkpoint ({error}); copy it again"
            ) from error


class ConformerEncoder(nn.Module):
    """Maps a whole sound to the embeddings of its rows, and to CTC logits if the head has text."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder, self.projector = model.model.encoder, model.model.projector
        attend_to_all(self.projector.qformer.config)
        config = self.encoder.config
        self.spells = config.output_dim >= _LEAST_CHARACTERS
        # Granite Speech Plus: the projector also reads these layers' outputs; 0: the first's input
        self.read_layers = getattr(config, "cat_hidden_layers", None) or ()

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return embeddings (E, W), and logits (T, C) if any; inputs: see ``StackedSound``."""
        features, is_frame, window_pairs = tensors
        encoder, is_frame = self.encoder, is_frame.flatten()
        states = encoder.input_linear(features.flatten(0, 1)[None])  # (1, T, D)
        read = [states] if 0 in self.read_layers else []
        for number, layer in enumerate(encoder.layers, 1):
            states = 0.5 * layer.ff1(states) + states
            states = _attended(layer.attn, states, is_frame, encoder.attention_dists) + states
            states = _convolved(layer.conv, states, is_frame) + states
            states = layer.post_norm(0.5 * layer.ff2(states) + states)
            if number == encoder.num_layers // 2:
                states = states + encoder.out_mid(encoder.out(states).softmax(-1))
            if number in self.read_layers:
                read.append(states)
        joined = torch.cat([*read, states], dim=-1)[0]
        windows = torch.cat([joined, joined.new_zeros(1, joined.shape[1])])[window_pairs]
        projector = self.projector
        queried = projector.qformer(
            query_embeds=projector.query.expand(windows.shape[0], -1, -1),
            encoder_hidden_states=windows,
            encoder_attention_mask=None,
            return_dict=True,
        )
        rows = projector.linear(queried.last_hidden_state.flatten(0, 1))
        return [rows, encoder.out(states)[0]] if self.spells else [rows]


def _attended(attention: Any, states: Tensor, is_frame: Tensor, distances: Tensor) -> Tensor:
    """Attend in blocks, with relative position biases; padding is never a key."""
    states = attention.pre_norm(states)[0]
    shape = (-1, attention.context_size, attention.num_heads, attention.dim_head)
    key, value = attention.to_kv(states).chunk(2, dim=-1)
    query, key, value = (
        each.reshape(shape).transpose(1, 2) for each in (attention.to_q(states), key, value)
    )
    bias = torch.einsum("bhcd,crd->bhcr", query, attention.rel_pos_emb(distances)) * attention.scale
    is_key = is_frame.reshape(-1, 1, 1, attention.context_size)
    bias = torch.where(is_key, bias, _HIDDEN)
    by_block = attended(query, key, value, bias, float(attention.scale))
    joined: Tensor = attention.to_out(by_block.transpose(1, 2).flatten(0, 1).flatten(1)[None])
    return joined


def _convolved(convolution: Any, states: Tensor, is_frame: Tensor) -> Tensor:
    """Convolve over time; padding is zeros, because transformers has no padding here."""
    states = convolution.norm(states).permute(0, 2, 1)
    states = torch.where(is_frame, convolution.glu(convolution.up_conv(states)), 0.0)
    states = convolution.batch_norm(convolution.depth_conv(states))
    result: Tensor = convolution.down_conv(convolution.silu(states)).permute(0, 2, 1)
    return result


def gate_media(sound: StackedSound) -> list[Medium]:
    """Return part of a window, tones across the end of a block, silence, and a long noise."""
    block, window = 2 * sound.block_pairs, 2 * sound.window_pairs
    num_long = -(-CALL_ROWS // sound.window_rows) * window + window // 2
    media = []
    tones = block + window // 2
    drawn = drawn_features(sound.num_mels, window // 2, tones, tones // 2, num_long)
    for name, features in drawn.items():
        num_pairs = features.shape[1] // 2
        stacked = features[:, : 2 * num_pairs].T.reshape(1, num_pairs, -1)
        arguments = {INPUT_FEATURES: torch.from_numpy(stacked.copy())}
        media.append(Medium(name=name, pieces=sound.pieces(features), arguments=arguments))
    return media
