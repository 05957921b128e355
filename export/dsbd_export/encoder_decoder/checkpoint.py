"""Description of an encoder-decoder: limits, start token, languages; checks of its options.

For a Whisper checkpoint also the features of sound, and the tokens that are not text.
"""

import dataclasses
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, WhisperFeatureExtractor

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.model_config import (
    CheckpointFiles,
    decoder_vocab_size,
    positions,
    read_checkpoint,
    reads_picture,
    reads_sound,
    text_config,
)
from dsbd_export.config import MIN_CONTEXT, DraftedOptions, ExportConfig, ModelOptions
from dsbd_export.encoder_decoder.picture import picture_entry
from dsbd_export.errors import ExportError, reason_of
from dsbd_export.tokenizers.older_tokenizers import is_marian, source_tokenizer
from dsbd_export.tokenizers.tokenizer_files import load_tokenizer
from dsbd_runtime.bundle_files.bundle import ModelEntry
from dsbd_runtime.errors import BundleError
from dsbd_runtime.parts.source.encoder_entry import EncoderEntry
from dsbd_runtime.parts.source.speech_entry import (
    FRAMES_A_POSITION,
    SpeechEntry,
    check_sound,
    check_speech,
)
from dsbd_runtime.typed_json import typed

_SETTINGS = ("preprocessor_config.json", "processor_config.json")
_SOUND = {  # transformers' names and defaults, by this package's names
    "sampling_rate": ("sampling_rate", 16_000),
    "num_mels": ("feature_size", 80),
    "n_fft": ("n_fft", 400),
    "hop_length": ("hop_length", 160),
    "chunk_seconds": ("chunk_length", 30),
}
_COPY = "copy generation_config.json of its base model, such as openai/whisper-base"


def feature_extractor(role: str, folder: Path, config: PreTrainedConfig) -> WhisperFeatureExtractor:
    """Return transformers' feature extractor for sound; ExportError if the encoder differs."""
    num_mels, num_frames = config.num_mel_bins, FRAMES_A_POSITION * config.max_source_positions
    if any((folder / name).is_file() for name in _SETTINGS):
        try:
            settings, _ = WhisperFeatureExtractor.get_feature_extractor_dict(
                str(folder), local_files_only=True
            )
            _check_sound(settings)
            extractor = WhisperFeatureExtractor.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:
            raise ExportError(
                f"the settings of the {role}'s features at {folder} cannot be read: "
                f"{reason_of(error)}; copy {_SETTINGS[0]} again"
            ) from error
    else:  # Whisper uses the defaults except for these
        extractor = WhisperFeatureExtractor(feature_size=num_mels)
    made = extractor.chunk_length * extractor.sampling_rate // extractor.hop_length
    if (extractor.feature_size, made) != (num_mels, num_frames):
        raise ExportError(
            f"the features of the {role} at {folder} are {extractor.feature_size} mels and {made} "
            f"frames of {extractor.chunk_length} s, its encoder reads {num_mels} and {num_frames}; "
            f"copy {_SETTINGS[0]} of its base model"
        )
    if extractor.dither:
        raise ExportError(
            f"the features of the {role} at {folder} are made with noise (dither "
            f"{extractor.dither}), which is not supported; set dither to 0.0 in {_SETTINGS[0]}"
        )
    return extractor


def _check_sound(said: dict[str, Any]) -> None:
    """Raise BundleError or ValueError unless settings are within limits."""
    settings = {ours: said.get(theirs, default) for ours, (theirs, default) in _SOUND.items()}
    for name, value in settings.items():
        if type(value) is not int:
            raise ValueError(f"{_SOUND[name][0]} is {value!r}, expected an integer")
    samples = settings["chunk_seconds"] * settings["sampling_rate"]
    num_frames = samples // max(settings["hop_length"], 1)
    check_sound({**settings, "num_frames": num_frames}, "the sound")


def speech_entry(files: CheckpointFiles) -> SpeechEntry:
    """Return the settings of sound in a checkpoint's files; ExportError if one is missing."""
    config, generation = files.config, files.generation
    if (max_source := files.options.max_source) is not None:
        raise ExportError(
            f"max_source={max_source} has no meaning for the {files.role} (family "
            f"{config.model_type}), whose source is a window of sound of fixed length; leave it out"
        )
    made = feature_extractor(files.role, files.folder, config)
    if not isinstance(no_timestamps := generation.get("no_timestamps_token_id"), int):
        raise ExportError(
            f"{_where(files)} has no_timestamps_token_id {no_timestamps!r}, expected a token id: "
            f"it is of an older version; {_COPY}"
        )
    suppressed = generation.get("suppress_tokens") or []
    languages, tasks = _languages_and_tasks(files)
    entry = SpeechEntry(
        sampling_rate=made.sampling_rate,
        num_mels=made.feature_size,
        n_fft=made.n_fft,
        hop_length=made.hop_length,
        chunk_seconds=made.chunk_length,
        num_frames=made.chunk_length * made.sampling_rate // made.hop_length,
        no_timestamps_token_id=no_timestamps,
        previous_token_id=_previous(files, suppressed),
        no_speech_token_id=no_timestamps - 1,
        suppress_tokens=suppressed,
        begin_suppress_tokens=generation.get("begin_suppress_tokens") or [],
        languages=languages,
        tasks=tasks,
        language=_default_language(files, languages),
        max_initial_timestamp_index=generation.get("max_initial_timestamp_index"),
        alignment_heads=_alignment_heads(files),
    )
    where = _where(files)
    try:
        entry = typed(SpeechEntry, dataclasses.asdict(entry), where)
        check_speech(entry, config.vocab_size, where)
    except BundleError as error:
        reason = str(error).removesuffix("; export the bundle again")
        raise ExportError(f"{reason}; {_COPY}") from error
    return entry


def _where(files: CheckpointFiles) -> str:
    return f"generation_config.json of the {files.role} at {files.folder}"


def _alignment_heads(files: CheckpointFiles) -> list[list[int]] | None:
    """Return layer and head of each alignment head; None if the decoder lacks their layers."""
    heads = files.generation.get("alignment_heads") or []
    num_heads = files.config.decoder_attention_heads
    for head in heads if isinstance(heads, list) else [heads]:
        is_pair = isinstance(head, list | tuple) and [type(each) for each in head] == [int, int]
        if not is_pair or head[0] < 0 or not 0 <= head[1] < num_heads:
            raise ExportError(
                f"{_where(files)} has {head!r} in alignment_heads, expected a layer and one of "
                f"its {num_heads} heads; {_COPY}, or remove alignment_heads: only times of "
                "words need them"
            )
    return [list(head) for head in heads if head[0] < files.config.decoder_layers] or None


def _languages_and_tasks(
    files: CheckpointFiles,
) -> tuple[dict[str, int] | None, dict[str, int] | None]:
    """Return the tokens of languages by code, and of tasks by name; None for an English model."""
    generation = files.generation
    if generation.get("is_multilingual") is False:
        return None, None
    languages, tasks = generation.get("lang_to_id"), generation.get("task_to_id")
    if not isinstance(languages, dict) or not isinstance(tasks, dict):
        raise ExportError(
            f"{_where(files)} has neither lang_to_id and task_to_id nor is_multilingual false: "
            f"it is of an older version; {_COPY}"
        )
    return {name.strip("<|>"): token for name, token in languages.items()}, dict(tasks)


def _default_language(files: CheckpointFiles, languages: dict[str, int] | None) -> str | None:
    """Return the code of the default language in generation_config.json."""
    language = files.generation.get("language")
    if language is None or languages is None:
        return None
    code = str(language).strip("<|>").lower()
    if code not in languages:
        examples = ", ".join(list(languages)[:6])
        raise ExportError(
            f"{_where(files)} has language {language!r}, expected the code of one of its "
            f"{len(languages)} languages, such as {examples}; change it"
        )
    return code


def _previous(files: CheckpointFiles, suppressed: Any) -> int:
    """Return the token that precedes an earlier text, found as in transformers."""
    token_id = files.generation.get("prev_sot_token_id")
    if isinstance(token_id, int):
        return token_id
    if not isinstance(suppressed, list) or suppressed[:-1] == [] or type(suppressed[-2]) is not int:
        raise ExportError(
            f"{_where(files)} has prev_sot_token_id {token_id!r}, expected a token id; {_COPY}"
        )
    token: int = suppressed[-2]
    return token


def is_encoder_decoder(files: CheckpointFiles) -> bool:
    """Return whether files are those of an encoder-decoder."""
    return reads_picture(files.config) or bool(text_config(files.config).is_encoder_decoder)


def read_encoder_decoder(files: CheckpointFiles) -> Checkpoint:
    """Return the description of an encoder-decoder."""
    return replace(read_checkpoint(files), encoder=_encoder_entry(files))


def _encoder_entry(files: CheckpointFiles) -> EncoderEntry:
    """Return an encoder's entry without cross rows; ExportError if it is not supported."""
    role, config = files.role, text_config(files.config)
    _check_options(role, config, files.options)
    name = "decoder_start_token_id"
    candidates = (
        files.generation.get(name),
        *(getattr(c, name, None) for c in (files.config, config)),
    )
    start = next((each for each in candidates if each is not None), None)
    if type(start) is not int or not 0 <= start < decoder_vocab_size(config):
        raise ExportError(
            f"the config of the {role} has decoder_start_token_id {start!r}, expected the token id "
            f"that every target begins with, 0 to {decoder_vocab_size(config) - 1}; add it to "
            "generation_config.json"
        )
    speech = speech_entry(files) if reads_sound(config) else None
    picture = picture_entry(files) if reads_picture(files.config) else None
    if speech is not None:
        length = speech.num_frames
    elif picture is not None:
        length = picture.num_positions
    else:
        length = positions(config, files.options.max_source)
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
        picture=picture,
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
"""Codes of languages, such as NLLB's eng_Latn, mBART's en_XX, and M2M100's __en__."""
_FEWEST = 2  # languages of a multilingual model


def with_languages(checkpoint: Checkpoint) -> Checkpoint:
    """Return a target with the tokens of its languages, unchanged if there are none."""
    if checkpoint.encoder is None or checkpoint.encoder.fixed is not None:
        return checkpoint
    if is_marian(checkpoint.tokenizer_folder):
        size = checkpoint.encoder.vocab_size
        _, unknown = source_tokenizer(checkpoint.tokenizer_folder, size)
        return replace(checkpoint, encoder=replace(checkpoint.encoder, unknown_token_id=unknown))
    tokenizer = load_tokenizer(checkpoint)
    token_by_code = {
        match[1]: int(tokenizer.convert_tokens_to_ids(token))
        for token in tokenizer.all_special_tokens
        if (match := _LANGUAGE.fullmatch(token)) is not None
    }
    languages = {
        name: token for name, token in token_by_code.items() if token < checkpoint.vocab_size
    }
    if len(languages) < _FEWEST:
        return checkpoint
    return replace(checkpoint, encoder=replace(checkpoint.encoder, languages=languages))


def check_readers(
    target: Checkpoint | ModelEntry, draft: Checkpoint | None, config: DraftedOptions
) -> None:
    """Raise ExportError if target and draft read different sources, or for a wrong option."""
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
        read_by_target, read_by_draft = target.encoder.reads, draft.encoder.reads
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
    speech, picture = encoder.speech, encoder.picture
    if picture is not None:
        return f"pictures ({picture})"
    if speech is None:
        return "text"
    return (
        f"sound ({speech.num_mels} mels, {speech.num_frames} frames at {speech.sampling_rate} Hz, "
        f"n_fft {speech.n_fft}, hop_length {speech.hop_length})"
    )
