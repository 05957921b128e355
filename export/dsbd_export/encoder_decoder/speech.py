"""Settings of a Whisper checkpoint: features of sound, and tokens that are not text."""

import dataclasses
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, WhisperFeatureExtractor

from dsbd_export.checkpoints.checkpoint_reading import CheckpointFiles
from dsbd_export.errors import ExportError, reason_of
from dsbd_runtime.errors import BundleError
from dsbd_runtime.parts.speech_entry import (
    FRAMES_A_POSITION,
    SpeechEntry,
    check_sound,
    check_speech,
)
from dsbd_runtime.typed_json import typed

_SETTINGS = ("preprocessor_config.json", "processor_config.json")
_SOUND = {  # by names of this package: transformers' names and defaults
    "sampling_rate": ("sampling_rate", 16_000),
    "num_mels": ("feature_size", 80),
    "n_fft": ("n_fft", 400),
    "hop_length": ("hop_length", 160),
    "chunk_seconds": ("chunk_length", 30),
}
_COPY = "copy generation_config.json of its base model, such as openai/whisper-base"


def feature_extractor(role: str, folder: Path, config: PreTrainedConfig) -> WhisperFeatureExtractor:
    """Return transformers' feature extractor for sound; raise ExportError if it does not fit."""
    num_mels, num_frames = config.num_mel_bins, FRAMES_A_POSITION * config.max_source_positions
    if any((folder / name).is_file() for name in _SETTINGS):
        try:
            said, _ = WhisperFeatureExtractor.get_feature_extractor_dict(
                str(folder), local_files_only=True
            )
            _check_sound(said)
            found = WhisperFeatureExtractor.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:
            raise ExportError(
                f"the settings of the {role}'s features at {folder} cannot be read: "
                f"{reason_of(error)}; copy {_SETTINGS[0]} again"
            ) from error
    else:  # Whisper uses the defaults except for these
        found = WhisperFeatureExtractor(feature_size=num_mels)
    made = found.chunk_length * found.sampling_rate // found.hop_length
    if (found.feature_size, made) != (num_mels, num_frames):
        raise ExportError(
            f"the features of the {role} at {folder} are {found.feature_size} mels and {made} "
            f"frames of {found.chunk_length} s, its encoder reads {num_mels} and {num_frames}; "
            f"copy {_SETTINGS[0]} of its base model"
        )
    if found.dither:
        raise ExportError(
            f"the features of the {role} at {folder} are made with noise (dither {found.dither}), "
            f"which is not supported; set dither to 0.0 in {_SETTINGS[0]}"
        )
    return found


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
    """Return the settings in the files of a checkpoint; raise ExportError if any is missing."""
    config, generation = files.config, files.generation
    if (most := files.options.max_source) is not None:
        raise ExportError(
            f"max_source={most} has no meaning for the {files.role} (family {config.model_type}), "
            "whose source is a window of sound of fixed length; leave it out"
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
    """Return the tokens of languages by code, and of tasks; None for a model of English."""
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
    said = files.generation.get("language")
    if said is None or languages is None:
        return None
    code = str(said).strip("<|>").lower()
    if code not in languages:
        known = ", ".join(list(languages)[:6])
        raise ExportError(
            f"{_where(files)} has language {said!r}, expected the code of one of its "
            f"{len(languages)} languages, such as {known}; change it"
        )
    return code


def _previous(files: CheckpointFiles, suppressed: Any) -> int:
    """Return the token before an earlier text, as transformers finds it."""
    said = files.generation.get("prev_sot_token_id")
    if isinstance(said, int):
        return said
    if not isinstance(suppressed, list) or suppressed[:-1] == [] or type(suppressed[-2]) is not int:
        raise ExportError(
            f"{_where(files)} has prev_sot_token_id {said!r}, expected a token id; {_COPY}"
        )
    token: int = suppressed[-2]
    return token
