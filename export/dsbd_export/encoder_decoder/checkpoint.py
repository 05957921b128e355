"""Config of an encoder-decoder: limits, start token, unsupported options."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.checkpoint_reading import CheckpointFiles, read_checkpoint
from dsbd_export.checkpoints.model_config import (
    decoder_vocab_size,
    positions,
    reads_sound,
    text_config,
)
from dsbd_export.config import MIN_CONTEXT, ModelOptions
from dsbd_export.encoder_decoder.speech import speech_entry
from dsbd_export.errors import ExportError
from dsbd_runtime.parts.encoder_entry import EncoderEntry


def is_encoder_decoder(files: CheckpointFiles) -> bool:
    """Return whether files are those of an encoder-decoder."""
    return bool(text_config(files.config).is_encoder_decoder)


def read_encoder_decoder(files: CheckpointFiles) -> Checkpoint:
    """Return the description of an encoder-decoder."""
    return replace(read_checkpoint(files), encoder=_encoder_entry(files))


def _encoder_entry(files: CheckpointFiles) -> EncoderEntry:
    """Return the entry of an encoder, without cross rows until the model is loaded.

    Raises:
        ExportError: the config is incomplete, or an option is not supported.
    """
    role, config = files.role, text_config(files.config)
    _check_options(role, config, files.options)
    name = "decoder_start_token_id"
    found = (files.generation.get(name), getattr(config, name, None))
    start = next((each for each in found if each is not None), None)
    if type(start) is not int or not 0 <= start < decoder_vocab_size(config):
        raise ExportError(
            f"the config of the {role} has decoder_start_token_id {start!r}, expected the token id "
            f"that every target begins with, 0 to {decoder_vocab_size(config) - 1}; add it to "
            "generation_config.json"
        )
    if reads_sound(config):
        speech = speech_entry(files)
        length = speech.num_frames
    else:
        speech, length = None, positions(config, files.options.max_source)
        if length < MIN_CONTEXT:
            raise ExportError(
                f"the {role} reads sources of {length} tokens, at least {MIN_CONTEXT} are needed"
            )
    return EncoderEntry(
        vocab_size=config.vocab_size,
        context_length=length,
        start_token_id=start,
        cross=[],
        speech=speech,
    )


def _check_options(role: str, config: PreTrainedConfig, options: ModelOptions) -> None:
    """Raise ExportError for an option that encoder-decoders do not support."""
    wrong = {
        "dtype": (options.dtype, "fp32", "its engines run on the CPU"),
        "engine": (options.engine, "onnx", "TensorRT does not support the rows of a source"),
        "form": (options.form, "portable", "its engines run on the CPU"),
        "attention": (
            options.attention or "fused",
            "fused",
            "exact sums over the rows of a source are not supported",
        ),
    }
    for field, (value, needed, reason) in wrong.items():
        if value != needed:
            raise ExportError(
                f"{field}={value!r} is not supported for the {role}, an encoder-decoder (family "
                f"{config.model_type}): {reason}; use {field}={needed!r}"
            )
