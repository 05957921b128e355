"""Checkpoint of a language model with given rows in its prompts, and checks of its options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from transformers import PreTrainedConfig

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.model_config import CheckpointFiles, read_decoder
from dsbd_export.config import DraftedOptions, ExportConfig, ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.given_prompt.kinds import GIVEN_KINDS, GivenKind
from dsbd_export.given_prompt.processor_files import refused
from dsbd_runtime.bundle_files.bundle import ModelEntry
from dsbd_runtime.errors import BundleError
from dsbd_runtime.media.given_grid import GridPicture
from dsbd_runtime.media.given_picture import GivenPicture
from dsbd_runtime.parts.given.given_medium import MediumEntry
from dsbd_runtime.parts.given.given_rows import GivenEntry
from dsbd_runtime.text.chat_template import ChatTemplate
from dsbd_runtime.typed_json import typed


@dataclass(frozen=True, kw_only=True)
class GivenCheckpoint(Checkpoint):
    """A checkpoint whose encoder is exported too; ``composite`` is the whole config."""

    given: GivenEntry

    @property
    def reads_whole_path(self) -> bool:
        return True

    @property
    def kind(self) -> GivenKind:
        return GIVEN_KINDS[self.family]

    @property
    def shares_encoder(self) -> bool:
        return bool(self.given.is_shared)

    @property
    def unread_inputs(self) -> list[str] | None:
        return None


def is_given_prompt(files: CheckpointFiles) -> bool:
    """Return whether files belong to one of ``GIVEN_KINDS``, and not only its text is exported."""
    return files.config.model_type in GIVEN_KINDS and not files.options.text_only


def carries_adapter(files: CheckpointFiles) -> bool:
    """Return whether an adapter in a checkpoint's folder is part of the checkpoint."""
    kind = GIVEN_KINDS.get(str(files.config_json.get("model_type")))
    return kind is not None and kind.has_own_adapter


def read_given_prompt(files: CheckpointFiles) -> GivenCheckpoint:
    """Return the description of a model; raise ExportError if it is not supported."""
    checkpoint = read_decoder(files)
    _check_options(checkpoint, files.options)
    entry = _entry(GIVEN_KINDS[checkpoint.family].entry(files), files.config)
    try:
        given = typed(GivenEntry, dataclasses.asdict(entry), "the config")
        given.check(checkpoint.vocab_size, len(checkpoint.layer_masks), "the config")
    except BundleError as error:
        reason = str(error).removesuffix("; export the bundle again")
        raise refused(files, f"{reason}; check config.json") from error
    if files.role == "target":
        _check_template(files)
    return GivenCheckpoint(**vars(checkpoint), given=given)


def _entry(medium: MediumEntry, config: PreTrainedConfig) -> GivenEntry:
    is_picture = isinstance(medium, GivenPicture)
    levels = getattr(config.vision_config, "deepstack_visual_indexes", ()) if is_picture else ()
    return GivenEntry(
        placeholder_token_id=config.image_token_id if is_picture else config.audio_token_id,
        width=config.get_text_config().hidden_size,
        levels=len(levels),
        position_axes=3 if isinstance(medium, GridPicture) else 1,  # time, height, width
        medium=medium,
    )


def _check_options(checkpoint: Checkpoint, options: ModelOptions) -> None:
    needed = {"dtype": "fp32", "engine": "onnx", "form": "portable"}
    for name, value in needed.items():
        if (option := getattr(options, name)) != value:
            raise ExportError(
                f"{name}={option!r} is not supported for the {checkpoint.role} (family "
                f"{checkpoint.family}), whose prompts have rows of an encoder: its engines run on "
                f"the CPU; use {name}={value!r}, or text_only=True for its text part alone"
            )


def _check_template(files: CheckpointFiles) -> None:
    """Raise ExportError if the checkpoint has no chat template to render conversations."""
    try:
        ChatTemplate.from_folder(files.folder)
    except BundleError as error:
        raise ExportError(
            f"the {files.role} at {files.folder} reads sound or pictures in conversations, but "
            "has no usable chat template; copy chat_template.jinja of its base model"
        ) from error


def check_given_pair(
    target: Checkpoint | ModelEntry, draft: Checkpoint | None, config: DraftedOptions
) -> None:
    """Raise ExportError for a draft that reads other given rows, or for the option ``features``."""
    read: GivenEntry | None = getattr(target, "given", None)
    if isinstance(draft, GivenCheckpoint) and (
        read is None
        or (read.medium, read.placeholder_token_id)
        != (draft.given.medium, draft.given.placeholder_token_id)
    ):
        raise ExportError(
            f"the draft (family {draft.family}) reads {draft.given.medium}, its target (family "
            f"{target.family}) {'text alone' if read is None else read.medium}; choose a draft of "
            "the same kind, or one that reads text alone"
        )
    if read is not None and isinstance(config, ExportConfig) and config.features:
        raise ExportError(
            f"features=True is not supported for the target (family {target.family}), whose "
            "prompts have rows of an encoder; leave features out"
        )
