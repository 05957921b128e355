"""Files of a checkpoint: its configs, and the description of the model in them."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.checkpoints.gguf_file import (
    gguf_end_ids,
    gguf_refusal,
    read_gguf_config,
    read_header,
)
from dsbd_export.checkpoints.json_files import json_object, read_proposed_tokens
from dsbd_export.checkpoints.model_config import (
    constant_rope_length,
    decoder_vocab_size,
    layer_masks,
    refusal_of,
    target_positions,
    text_config,
    window_within,
)
from dsbd_export.config import MAX_CONTEXT, MIN_CONTEXT, ModelOptions
from dsbd_export.errors import ExportError, reason_of
from dsbd_runtime.parts.attention_rows import ATTENTION_MASK_SLIDING


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint folder; its configs are read when needed."""

    role: str
    folder: Path
    options: ModelOptions
    gguf_file: str | None = None

    @cached_property
    def config(self) -> PreTrainedConfig:
        """Return the config of transformers; the whole config for a composite model."""
        try:
            with quiet_libraries():
                return AutoConfig.from_pretrained(
                    self.folder,
                    trust_remote_code=self.options.trust_remote_code,
                    local_files_only=True,
                )
        except Exception as error:
            raise ExportError(
                f"the config of the {self.role} at {self.folder} cannot be read: "
                f"{reason_of(error)}; check config.json, or allow its own code with "
                "trust_remote_code if you trust it"
            ) from error

    @cached_property
    def generation(self) -> dict[str, Any]:
        """Return the content of generation_config.json, {} without such a file."""
        file = self.folder / "generation_config.json"
        return json_object(file) if file.is_file() else {}


class GgufFiles(CheckpointFiles):
    """A checkpoint in a single GGUF file."""

    @cached_property
    def config(self) -> PreTrainedConfig:
        role, file, header = self.role, self._file, read_header(self._file)
        with quiet_libraries():
            config = read_gguf_config(role, file, header)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ExportError(
                f"the {role} in {file} (family {config.model_type}) is not a causal language model "
                "of transformers; export the checkpoint folder that the file was made from"
            )
        if what := gguf_refusal(header, config):
            raise ExportError(
                f"the {role} in {file} changes its rotary frequencies ({what}), which "
                "transformers' reader of GGUF leaves out; export the checkpoint folder that the "
                "file was made from"
            )
        return config

    @cached_property
    def generation(self) -> dict[str, Any]:
        return {"eos_token_id": gguf_end_ids(read_header(self._file))}

    @property
    def _file(self) -> Path:
        assert self.gguf_file is not None  # always given with this class
        return self.folder / self.gguf_file


def read_checkpoint(files: CheckpointFiles) -> Checkpoint:
    """Return the description of a model of transformers, without its encoder."""
    role, folder, whole = files.role, files.folder, files.config
    if reason := refusal_of(whole):
        raise ExportError(
            f"the {role} at {folder} (family {whole.model_type}) cannot be exported: {reason}; "
            "choose another checkpoint"
        )
    config = text_config(whole)
    context_length = _context_length(role, config, files.options.max_context)
    window = window_within(config, context_length)
    masks = layer_masks(config, window)
    vocab_size = decoder_vocab_size(config)
    proposed = read_proposed_tokens(folder, vocab_size)
    if proposed is not None and role != "draft":
        raise ExportError(
            f"the {role} at {folder} was trained to propose {len(proposed)} tokens only, as the "
            f"draft of another model; give it as the draft, and that model as the {role}"
        )
    bos = _special_tokens(files, "bos_token_id")
    return Checkpoint(
        role=role,
        folder=folder,
        config=config,
        vocab_size=vocab_size,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_special_tokens(files, "eos_token_id"),
        context_length=context_length,
        layer_masks=masks,
        sliding_window=window if ATTENTION_MASK_SLIDING in masks else None,
        trust_remote_code=files.options.trust_remote_code,
        composite=None if whole is config else whole,
        gguf_file=files.gguf_file,
        proposed_tokens=proposed,
    )


def read_decoder(files: CheckpointFiles) -> Checkpoint:
    """Return the description of a causal language model."""
    checkpoint = read_checkpoint(files)
    if (most := files.options.max_source) is not None:
        raise ExportError(
            f"max_source={most} has no meaning for the {files.role} (family "
            f"{checkpoint.family}), which reads no source; leave it out"
        )
    return checkpoint


def _special_tokens(files: CheckpointFiles, name: str) -> list[int]:
    """Return token ids, those of generation_config.json first; or raise ExportError."""
    whole = files.config
    places = (getattr(whole, name, None), getattr(text_config(whole), name, None))
    given = (files.generation.get(name), *places)
    found: Any = next((each for each in given if each is not None), [])
    tokens = found if isinstance(found, list | tuple) else [found]
    if not all(type(token) is int for token in tokens):
        raise ExportError(
            f"the {files.role} at {files.folder} has {name} {found!r}, expected a token id"
            f"{' or a list of them' * (name == 'eos_token_id')}; change it in "
            "generation_config.json or config.json"
        )
    return list(tokens)


def _context_length(role: str, config: PreTrainedConfig, max_context: int | None) -> int:
    """Return the exported context; by default the longest with constant rotary frequencies."""
    of_checkpoint: int | None = getattr(config, "max_position_embeddings", None)
    if config.is_encoder_decoder:
        of_checkpoint = target_positions(config, max_context)
    elif max_context is None:
        max_context = constant_rope_length(config)
    if of_checkpoint is None and max_context is None:
        raise ExportError(
            f"the config of the {role} names no max_position_embeddings; give max_context"
        )
    lengths = [length for length in (of_checkpoint, max_context) if length is not None]
    if min(lengths) < MIN_CONTEXT:
        raise ExportError(
            f"the {role} has a context of {min(lengths)} tokens, at least {MIN_CONTEXT} are needed"
        )
    if min(lengths) > MAX_CONTEXT:
        raise ExportError(
            f"the {role} has a context of {min(lengths)} tokens by its config, at most "
            f"{MAX_CONTEXT} are possible; give max_context"
        )
    return min(lengths)
