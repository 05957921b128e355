"""Config of a transformers model: refusals, masks and limits, and the checkpoint's description."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from optimum.utils.normalized_config import (
    NormalizedConfig,
    NormalizedConfigManager,
    NormalizedTextConfigWithGQA,
)
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)

from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.checkpoints.checkpoint_files import (
    json_object,
    json_object_or_none,
    read_proposed_tokens,
)
from dsbd_export.checkpoints.families import DEFAULT_FAMILY, FAMILIES
from dsbd_export.checkpoints.gguf_ends import ends_by_text, named_ends
from dsbd_export.checkpoints.gguf_file import gguf_refusal, read_gguf_config, read_header
from dsbd_export.checkpoints.other_tasks import refusal_of_gguf_task, refusal_of_task
from dsbd_export.checkpoints.quantized_weights import refusal_of_quantization
from dsbd_export.config import MAX_CONTEXT, MIN_CONTEXT, ModelOptions
from dsbd_export.errors import ExportError, reason_of
from dsbd_runtime.parts.attention.attention_rows import ATTENTION_MASK, ATTENTION_MASK_SLIDING

MASK_BY_LAYER_TYPE = {
    "full_attention": ATTENTION_MASK,
    "sliding_attention": ATTENTION_MASK_SLIDING,
    "hybrid": ATTENTION_MASK,  # with a recurrence
    "linear_attention": None,
    "conv": None,
    "mlp": None,
    "moe": None,
}
"""Mask input by layer type, for layer types that can be exported; None: no mask."""

_BY_LAYER_TYPE = {
    "hybrid_sliding": "keeps a state in addition to its rows, which a tree of tokens cannot share",
    "chunked_attention": "needs a mask of chunks, which the graph lacks",
}
_SPEECH_FAMILY = "whisper"
_UNLIMITED = 512  # tokens, for a model without a limit: most were trained with this length
_NEEDED = ("num_layers", "hidden_size", "vocab_size")


def reads_sound(config: PreTrainedConfig) -> bool:
    """Return whether the source of a model is sound in a supported form."""
    return bool(config.model_type == _SPEECH_FAMILY)


def reads_picture(config: PreTrainedConfig) -> bool:
    """Return whether the source of a model is a picture; its decoder has a separate config."""
    return bool(config.model_type == "vision-encoder-decoder")


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the text part of a composite model, or the whole config."""
    is_whole = config.is_encoder_decoder and not reads_picture(config)
    return config if is_whole else config.get_text_config(decoder=True)


def model_class_of(config: PreTrainedConfig) -> Any:
    """Return transformers' model class for a config, None if no class continues text."""
    if reads_sound(config):
        return MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING[type(config)]
    if config.is_encoder_decoder and not reads_picture(config):
        return MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.get(type(config), None)
    causal = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    multimodal = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    # The causal class of a composite model may expect the config of the text part.
    is_composite = text_config(config) is not config
    return multimodal or causal if is_composite else causal or multimodal


def window_within(config: PreTrainedConfig, context_length: int) -> int | None:
    """Return the sliding window of a config, None if no sequence is longer than the window."""
    window: int | None = getattr(config, "sliding_window", None)
    return window if window is not None and window < context_length else None


def layer_masks(config: PreTrainedConfig, window: int | None) -> tuple[str | None, ...]:
    """Return the mask input of each layer, None for a layer without attention."""
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        return (ATTENTION_MASK,) * num_decoder_layers(config)
    layer_types: list[str] | None = getattr(config, "layer_types", None)
    if layer_types is None:
        num_layers: int = normalized_config(config).num_layers
        return (ATTENTION_MASK if window is None else ATTENTION_MASK_SLIDING,) * num_layers
    masks = [MASK_BY_LAYER_TYPE[layer_type] for layer_type in layer_types]
    return tuple(ATTENTION_MASK if mask and window is None else mask for mask in masks)


def normalized_config(config: PreTrainedConfig) -> NormalizedConfig:
    """Return optimum's view of a config, which has the same names for all families."""
    try:
        kind = NormalizedConfigManager.get_normalized_config_class(config.model_type)
    except KeyError:
        kind = NormalizedTextConfigWithGQA  # the names that Llama and most others use
    return kind(config)


def refusal_of(config: PreTrainedConfig) -> str | None:
    """Return why a checkpoint with this config cannot be exported, None if it may be."""
    if reason := next(_refusals(config), None):
        return reason
    if model_class_of(config) is None and not hasattr(config, "auto_map"):
        return (
            f"transformers has no model class that continues text for {type(config).__name__}, "
            "the config of a part of a model or of a model for another task"
        )
    return None


def _refusals(config: PreTrainedConfig) -> Iterator[str]:
    if refusal := FAMILIES.get(config.model_type, DEFAULT_FAMILY).refusal:
        yield refusal
    if config.is_encoder_decoder and model_class_of(config) is None:
        yield (
            "it is an encoder-decoder that reads neither text nor, as Whisper does, sound, nor "
            "pictures as TrOCR does, or no class of transformers writes text"
        )
        return
    if reason := refusal_of_quantization(config):
        yield reason
    if (text := text_config(config)) is not config:
        yield from _refusals(text)
        return
    if getattr(config, "alibi", False):
        yield str(FAMILIES["bloom"].refusal)
    for layer_type in getattr(config, "layer_types", None) or []:
        if layer_type not in MASK_BY_LAYER_TYPE:
            reason_if_unknown = (
                f"is not known; {', '.join(sorted(MASK_BY_LAYER_TYPE))} can be exported"
            )
            reason = _BY_LAYER_TYPE.get(layer_type, reason_if_unknown)
            yield f"a layer of type {layer_type!r} {reason}"
    if config.is_encoder_decoder:
        return
    for name in _NEEDED:
        if not normalized_config(config).has_attribute(name):
            yield f"its config has no {name} under any known name"


def constant_rope_length(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence with constant frequencies, None if they are always constant."""
    limits = [
        parameters.get("original_max_position_embeddings", config.max_position_embeddings)
        # transformers raises a dynamic base beyond max_position_embeddings, whatever the other
        # fields
        if parameters["rope_type"] == "longrope"
        else config.max_position_embeddings
        for parameters in _rope_parameters(getattr(config, "rope_parameters", None))
        if parameters["rope_type"] in ("dynamic", "longrope")
    ]
    return min(limits, default=None)


def _rope_parameters(content: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the rope parameters of a config: one dict, or one dict for each layer type."""
    content = content or {}
    if "rope_type" in content:
        yield content
    for value in content.values():
        if isinstance(value, dict):
            yield from _rope_parameters(value)


def positions(config: PreTrainedConfig, wanted: int | None) -> int:
    """Return the maximum number of tokens that a model reads of a source, or of a target."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return wanted or getattr(config, "n_positions", None) or _UNLIMITED
    return limit if wanted is None else min(limit, wanted)


def target_positions(config: PreTrainedConfig, wanted: int | None) -> int:
    """Return the maximum number of tokens that a model reads of a target; see ``positions``."""
    limit: int | None = getattr(config, "max_target_positions", None)
    if limit is None:
        return positions(config, wanted)
    return limit if wanted is None else min(limit, wanted)


def num_decoder_layers(config: PreTrainedConfig) -> int:
    """Return the number of the decoder's layers, which may differ from the encoder's."""
    named = (getattr(config, name, None) for name in ("num_decoder_layers", "decoder_layers"))
    num_layers = next((each for each in named if each is not None), None)
    return int(normalized_config(config).num_layers if num_layers is None else num_layers)


def decoder_vocab_size(config: PreTrainedConfig) -> int:
    """Return the vocabulary size of targets; in Marian, sources may have another one."""
    of_targets: int | None = getattr(config, "decoder_vocab_size", None)
    return int(config.vocab_size if of_targets is None else of_targets)


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint folder; each of its configs is read once, when needed."""

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

    @cached_property
    def config_json(self) -> dict[str, Any]:
        """Return the content of config.json; {} if it is invalid, which ``config`` reports."""
        return json_object_or_none(self.folder / "config.json") or {}


class GgufFiles(CheckpointFiles):
    """A checkpoint in a single GGUF file."""

    @cached_property
    def config(self) -> PreTrainedConfig:
        role, file, header = self.role, self._file, read_header(self._file)
        if reason := refusal_of_gguf_task(header):
            raise ExportError(f"the {role} in {file} cannot be exported: {reason}; choose another")
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
        header, size = read_header(self._file), decoder_vocab_size(text_config(self.config))
        further = [index for index in ends_by_text(header).values() if index < size]
        return {"eos_token_id": [*named_ends(header), *further] or None}

    @property
    def _file(self) -> Path:
        assert self.gguf_file is not None  # always given with this class
        return self.folder / self.gguf_file


def read_checkpoint(files: CheckpointFiles) -> Checkpoint:
    """Return the description of a model of transformers, without its encoder."""
    role, folder, whole = files.role, files.folder, files.config
    of_task = refusal_of_task(whole, folder) if files.gguf_file is None else None
    if reason := of_task or refusal_of(whole):
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
    if (max_source := files.options.max_source) is not None:
        raise ExportError(
            f"max_source={max_source} has no meaning for the {files.role} (family "
            f"{checkpoint.family}), which reads no source; leave it out"
        )
    return checkpoint


def _special_tokens(files: CheckpointFiles, name: str) -> list[int]:
    """Return special token ids, preferably from generation_config.json; or raise ExportError."""
    whole = files.config
    places = (getattr(whole, name, None), getattr(text_config(whole), name, None))
    given = (files.generation.get(name), *places)
    value: Any = next((each for each in given if each is not None), [])
    tokens = value if isinstance(value, list | tuple) else [value]
    if not all(type(token) is int for token in tokens):
        raise ExportError(
            f"the {files.role} at {files.folder} has {name} {value!r}, expected a token id"
            f"{' or a list of them' * (name == 'eos_token_id')}; change it in "
            "generation_config.json or config.json"
        )
    return list(tokens)


def _context_length(role: str, config: PreTrainedConfig, max_context: int | None) -> int:
    """Return the exported context length; by default the longest with constant frequencies."""
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
