"""Checkpoint of a feature draft (EAGLE-3), in either published layout, and checks of its options.

A feature draft predicts from the embedding of a token and the *feature* of the token before it. A
feature is the concatenation of hidden states that enter some layers of the target. If the target
has not computed that token, the feature is the draft's own output. Two layouts are published:

* SGLang's: architecture ``LlamaForCausalLMEagle3``, one flat config, weights ``midlayer.*``;
* the speculators library's: ``speculators_model_type`` "eagle3", the transformer layer in
  ``transformer_layer_config``, weights ``layers.0.*``.

They number the target's layers differently. SGLang's names the layer that a hidden state leaves,
the library's the layer that it enters.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.model_config import CheckpointFiles, constant_rope_length, layer_masks
from dsbd_export.config import MIN_CONTEXT, ONNX, ModelOptions
from dsbd_export.errors import ExportError, reason_of
from dsbd_export.pair import check_tokens
from dsbd_export.parts.features import NUM_LAYERS, default_layers
from dsbd_export.progress import Report
from dsbd_export.tokenizers.tokenizer_files import read_tokenizer, tokenizer_content
from dsbd_runtime.bundle_files.bundle import TOKENIZER_FILE, Bundle, ModelEntry

FEATURE_FAMILY = "eagle3"
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LIBRARY_TYPE = "speculators_model_type"
_LAYER_CONFIG = "transformer_layer_config"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_LAYER_CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}


@dataclass(frozen=True, kw_only=True)
class FeatureDraftConfig:
    """Computation of a feature draft, independent of its layout."""

    layer: PreTrainedConfig  # config of its transformer layer; ``vocab_size`` is the target's
    draft_vocab_size: int  # number of tokens that it can propose
    target_hidden_size: int  # width of one hidden state of the target
    # layers of the target that the hidden states enter; None: ``default_layers``
    layers: tuple[int, ...] | None = None
    # the residual of the layer is the feature after its norm, not before
    norm_before_residual: bool = False
    # the draft's own feature is its output after the final norm, not before
    norm_output: bool = False
    # the concatenated hidden states are normalized before the projection
    norm_before_fc: bool = False
    fc_norm: bool = False  # each hidden state is normalized separately before the projection
    fc_bias: bool = False
    ties_head: bool = False

    @property
    def num_target_layers(self) -> int:
        return NUM_LAYERS if self.layers is None else len(self.layers)

    @property
    def feature_width(self) -> int:
        return self.num_target_layers * self.target_hidden_size

    def target_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return which of ``num_layers`` layers are read; raise ExportError if absent."""
        layers = default_layers(num_layers) if self.layers is None else self.layers
        if len(layers) < self.num_target_layers or not all(0 <= i < num_layers for i in layers):
            read = f"{NUM_LAYERS} layers" if self.layers is None else f"layers {list(layers)}"
            raise ExportError(
                f"the draft reads the inputs of {read} of its target, which has {num_layers} "
                "layers; give the target that it was trained for"
            )
        return layers


def is_feature_draft(content: Mapping[str, Any]) -> bool:
    """Return whether the content of config.json is that of a feature draft."""
    return LIBRARY_TYPE in content or any(
        "eagle" in str(name).lower() for name in content.get("architectures") or []
    )


def read_feature_config(files: CheckpointFiles) -> FeatureDraftConfig:
    """Return the config of a feature draft; raise ExportError if it is unsupported."""
    content, where = files.config_json, f"the draft at {files.folder}"
    if reason := next(_refusals(content), None):
        raise ExportError(f"{where} cannot be exported: {reason}; choose another checkpoint")
    try:
        config = _config_of(content)
    except Exception as error:  # transformers raises many types
        raise ExportError(
            f"the config of {where} cannot be read: {reason_of(error)}; check config.json"
        ) from error
    if reason := next(_layer_refusals(config), None):
        raise ExportError(f"{where} cannot be exported: {reason}; choose another checkpoint")
    return config


def _refusals(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield reasons why a config is another kind of draft, or an unsupported variant."""
    if LIBRARY_TYPE in content:
        if (kind := content[LIBRARY_TYPE]) != FEATURE_FAMILY:
            yield f"its {LIBRARY_TYPE} is {kind!r}, only {FEATURE_FAMILY!r} is supported"
        if "norm_before_residual" not in content:
            yield (
                "its config lacks norm_before_residual, which engines read as true, but the "
                "library that wrote it as false; add the value it was trained with"
            )
    elif not set(content["architectures"]) & set(ARCHITECTURES):
        yield f"its architectures are {content['architectures']}, supported is {ARCHITECTURES[0]}"
    if not (content.get("eagle_config") or {}).get("use_aux_hidden_state", True):
        yield "it reads only the last hidden state, like EAGLE before version 3"
    if content.get("quantization_config") is not None:
        yield "its weights are already quantized, a checkpoint in fp32, fp16 or bf16 is needed"
    for name, neutral in (("logit_scale", 1.0), ("parallel_drafting", False)):
        if content.get(name, neutral) not in (None, neutral):
            yield f"its config says {name}={content[name]!r}, which this version does not support"


def _layer_refusals(config: FeatureDraftConfig) -> Iterator[str]:
    layer = config.layer
    if layer.num_hidden_layers != 1:
        yield f"it has {layer.num_hidden_layers} transformer layers, expected 1"
    if set(getattr(layer, "layer_types", None) or ()) - {"full_attention"}:
        yield f"its layer attends by {layer.layer_types[0]!r}, expected 'full_attention'"
    if config.norm_before_fc and config.fc_norm:
        yield "its config sets both norm_before_fc and fc_norm, which exclude each other"
    if config.ties_head and config.draft_vocab_size != layer.vocab_size:
        yield (
            f"its head is its embedding, but its vocabulary has {config.draft_vocab_size} of "
            f"{layer.vocab_size} tokens"
        )


def _config_of(content: Mapping[str, Any]) -> FeatureDraftConfig:
    is_flat = LIBRARY_TYPE not in content
    layer_content = {"model_type": "llama", **content} if is_flat else dict(content[_LAYER_CONFIG])
    if (kind := layer_content.get("model_type")) not in _LAYER_CONFIGS:
        raise ValueError(f"its layer has model_type {kind!r}, supported are {list(_LAYER_CONFIGS)}")
    layer = _LAYER_CONFIGS[kind].from_dict(layer_content)
    ids = (content.get("eagle_config") or {}).get(_LAYER_IDS) if is_flat else None
    num_proposed = content.get("draft_vocab_size") if is_flat else content["draft_vocab_size"]
    return FeatureDraftConfig(
        layer=layer,
        draft_vocab_size=int(num_proposed or layer.vocab_size),
        target_hidden_size=int(content.get("target_hidden_size") or layer.hidden_size),
        layers=_layers(content.get(_LAYER_IDS), 0) if ids is None else _layers(ids, 1),
        norm_before_residual=bool(content.get("norm_before_residual")),
        norm_output=bool(content.get("norm_output")),
        norm_before_fc=bool(content.get("norm_before_fc")),
        fc_norm=bool(content.get("fc_norm")),
        fc_bias=is_flat and bool(content.get("bias")),
        ties_head=is_flat and bool(content.get("tie_word_embeddings")),
    )


def _layers(ids: Any, offset: int) -> tuple[int, ...] | None:
    """Return the layers that hidden states enter: the numbers in a config plus ``offset``."""
    if ids is None:
        return None
    if not ids or not all(isinstance(number, int) for number in ids):
        raise ValueError(f"{_LAYER_IDS} is {ids!r}, expected numbers of layers")
    return tuple(number + offset for number in ids)


@dataclass(frozen=True, kw_only=True)
class FeatureDraftCheckpoint(Checkpoint):
    """A feature draft; ``config`` is the config of its transformer layer."""

    features: FeatureDraftConfig

    @property
    def family(self) -> str:
        return FEATURE_FAMILY

    @property
    def names_proposed(self) -> bool:
        return True


def has_feature_draft(files: CheckpointFiles) -> bool:
    """Return whether files are a feature draft in one of the published layouts."""
    return files.gguf_file is None and is_feature_draft(files.config_json)


def read_feature_draft(files: CheckpointFiles) -> Checkpoint:
    """Return a feature draft; ``paired_features`` adds settings of its target."""
    role, folder = files.role, files.folder
    if role != "draft":
        raise ExportError(
            f"the {role} at {folder} is a feature draft (EAGLE), which works only with its target; "
            f"give it as the draft, and the model that it was trained for as the {role}"
        )
    features = read_feature_config(files)
    layer = features.layer
    return FeatureDraftCheckpoint(
        role=role,
        folder=folder,
        config=layer,
        vocab_size=layer.vocab_size,
        bos_token_id=None,
        eos_token_ids=[],
        context_length=layer.max_position_embeddings,
        layer_masks=layer_masks(layer, None),
        sliding_window=None,
        trust_remote_code=False,
        features=features,
    )


def agreed_features(
    draft: FeatureDraftCheckpoint, target: Checkpoint | ModelEntry
) -> FeatureDraftCheckpoint:
    """Return a feature draft with its target's tokens and context; or raise ExportError."""
    if draft.vocab_size != target.vocab_size:
        raise ExportError(
            f"vocab_size is {target.vocab_size} in the target and {draft.vocab_size} in the draft "
            f"at {draft.folder}; give the target that the draft was trained for"
        )
    limit = constant_rope_length(draft.config) or target.context_length
    context = min(limit, target.context_length)
    if context < MIN_CONTEXT:
        raise ExportError(
            f"the rotary frequencies of the draft at {draft.folder} change beyond {context} "
            f"positions, at least {MIN_CONTEXT} are needed; choose another checkpoint"
        )
    return replace(
        draft,
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
        context_length=context,
    )


def paired_features(
    target: Checkpoint, draft: Checkpoint, report: Report
) -> tuple[Checkpoint, Checkpoint]:
    """Return target and draft with agreed features; ExportError if their tokens differ."""
    assert isinstance(draft, FeatureDraftCheckpoint)  # its kind was checked
    target = replace(target, feature_layers=layers_read(draft.features, target.config))
    if (draft.folder / TOKENIZER_FILE).is_file():
        check_tokens(read_tokenizer(target), target.vocab_size, draft, report)
    if target.gguf_file is not None:
        raise ExportError(
            f"the draft at {draft.folder} is a feature draft, which shares weights with its "
            f"target; {target.gguf_file} is a GGUF file, give the target's checkpoint folder"
        )
    return target, replace(agreed_features(draft, target), target_folder=target.folder)


def added_features(bundle: Bundle, draft: Checkpoint, report: Report) -> Checkpoint:
    """Return a draft aligned with a bundle's target; same errors as ``paired_features``."""
    assert isinstance(draft, FeatureDraftCheckpoint)  # its kind was checked
    target = bundle.entry("target")
    if (draft.folder / TOKENIZER_FILE).is_file():
        content = tokenizer_content(bundle.path / TOKENIZER_FILE)
        check_tokens(content, target.vocab_size, draft, report)
    agreed = agreed_features(draft, target)
    check_target(draft.features, bundle)
    return agreed


def check_features_pair(
    _target: Checkpoint | ModelEntry, draft: Checkpoint | None, options: ModelOptions
) -> None:
    """Raise ExportError for a feature draft with options that it does not support."""
    if isinstance(draft, FeatureDraftCheckpoint):
        check_form(options)


def check_form(options: ModelOptions) -> None:
    """Raise ExportError for options that feature drafts do not support."""
    if options.calibration_texts:
        raise ExportError(
            f"calibration_texts={options.calibration_texts[0]!r} is not supported for a feature "
            "draft, which reads the features of a target; leave it out"
        )
    if options.engine != ONNX:
        raise ExportError(
            f"a feature draft does not support engine={options.engine!r}; use engine={ONNX!r}, or "
            "a draft that is a model of its own"
        )


def layers_read(features: FeatureDraftConfig, target: PreTrainedConfig) -> tuple[int, ...]:
    """Return the layers of a target whose inputs a draft reads; raise ExportError if absent."""
    text = target.get_text_config()
    if text.hidden_size != features.target_hidden_size:
        raise ExportError(
            f"the draft reads hidden states of {features.target_hidden_size} numbers, the target's "
            f"have {text.hidden_size}; give the target that the draft was trained for"
        )
    return features.target_layers(text.num_hidden_layers)


def check_target(features: FeatureDraftConfig, bundle: Bundle) -> None:
    """Raise ExportError unless a bundle's target returns the features that a draft reads."""
    again = "export both together, with --target and --draft"
    returned = bundle.entry("target").features
    if returned is None or returned.layers is None:
        raise ExportError(
            f"the target of {bundle.path} returns no features, which this draft reads; {again}, or "
            "the target with --features"
        )
    wanted = features.layers if features.layers is not None else tuple(returned.layers)
    if returned.width != features.feature_width or tuple(returned.layers) != wanted:
        raise ExportError(
            f"the target of {bundle.path} returns the inputs of its layers {returned.layers}, "
            f"{returned.width} numbers, but this draft reads layers {list(wanted)}, "
            f"{features.feature_width} numbers; {again}"
        )
