"""Description of an encoder-decoder: limits, start token, languages; checks of its options."""

import re
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
from dsbd_export.config import MIN_CONTEXT, DraftedOptions, ExportConfig, ModelOptions
from dsbd_export.encoder_decoder.speech import speech_entry
from dsbd_export.errors import ExportError
from dsbd_export.tokenizers.marian_tokenizer import is_marian, source_tokenizer
from dsbd_export.tokenizers.tokenizer_files import load_tokenizer
from dsbd_runtime.bundle_files.bundle import ModelEntry
from dsbd_runtime.parts.encoder_entry import EncoderEntry


def is_encoder_decoder(files: CheckpointFiles) -> bool:
    """Return whether files are those of an encoder-decoder."""
    return bool(text_config(files.config).is_encoder_decoder)


def read_encoder_decoder(files: CheckpointFiles) -> Checkpoint:
    """Return the description of an encoder-decoder."""
    return replace(read_checkpoint(files), encoder=_encoder_entry(files))


def _encoder_entry(files: CheckpointFiles) -> EncoderEntry:
    """Return an encoder's entry without cross rows; raise ExportError if not supported."""
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


_LANGUAGE = re.compile(r"(?:__)?([a-z]{2,3}(?:_[A-Z]{2}|_[A-Z][a-z]{3})?)(?:__)?")
"""Such as NLLB's eng_Latn, mBART's en_XX, and M2M100's __en__."""
_FEWEST = 2


def with_languages(checkpoint: Checkpoint) -> Checkpoint:
    """Return a target with the tokens of its languages, unchanged if there are none."""
    if checkpoint.encoder is None or checkpoint.encoder.speech is not None:
        return checkpoint
    if is_marian(checkpoint.tokenizer_folder):
        size = checkpoint.encoder.vocab_size
        unknown = source_tokenizer(checkpoint.tokenizer_folder, size).unknown
        return replace(checkpoint, encoder=replace(checkpoint.encoder, unknown_token_id=unknown))
    tokenizer = load_tokenizer(checkpoint)
    found = {
        match[1]: int(tokenizer.convert_tokens_to_ids(token))
        for token in tokenizer.all_special_tokens
        if (match := _LANGUAGE.fullmatch(token)) is not None
    }
    known = {name: token for name, token in found.items() if token < checkpoint.vocab_size}
    if len(known) < _FEWEST:
        return checkpoint
    return replace(checkpoint, encoder=replace(checkpoint.encoder, languages=known))


def check_readers(
    target: Checkpoint | ModelEntry, draft: Checkpoint | None, config: DraftedOptions
) -> None:
    """Raise ExportError if only one of a pair reads a source, or an option is not supported."""
    if draft is not None and (target.encoder is None) != (draft.encoder is None):
        reader, other = ("target", "draft") if draft.encoder is None else ("draft", "target")
        family = draft.family if other == "draft" else target.family
        raise ExportError(
            f"the {reader} is an encoder-decoder, the {other} (family {family}) reads no source: "
            "expected both or neither; choose a pair of one kind"
        )
    if target.encoder is None:
        return
    if draft is not None and draft.encoder is not None:
        read_by_target, read_by_draft = target.encoder.sound, draft.encoder.sound
        if read_by_target != read_by_draft:
            raise ExportError(
                f"the target (family {target.family}) reads {_in_words(target.encoder)}, the draft "
                f"(family {draft.family}) {_in_words(draft.encoder)}: both must read "
                "the same source; choose a draft of the same kind"
            )
    if isinstance(config, ExportConfig) and config.features:
        raise ExportError(
            f"features=True is not supported for the target (family {target.family}), an "
            "encoder-decoder; leave features out"
        )


def _in_words(encoder: EncoderEntry) -> str:
    """Return the input of an encoder in words."""
    speech = encoder.speech
    if speech is None:
        return "text"
    return (
        f"sound ({speech.num_mels} mels, {speech.num_frames} frames at {speech.sampling_rate} Hz, "
        f"n_fft {speech.n_fft}, hop_length {speech.hop_length})"
    )
