"""Checkpoint of a feature draft, its agreement with a target, and unsupported options."""

from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.checkpoint_reading import CheckpointFiles
from dsbd_export.checkpoints.model_config import constant_rope_length, layer_masks
from dsbd_export.config import MIN_CONTEXT, ONNX, ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.feature_draft.config import (
    FEATURE_FAMILY,
    FeatureDraftConfig,
    is_feature_draft,
    read_feature_config,
)
from dsbd_export.pair import check_tokens
from dsbd_export.progress import Report
from dsbd_export.tokenizers.tokenizer_files import read_tokenizer, tokenizer_content
from dsbd_runtime.bundle_files.bundle import TOKENIZER_FILE, Bundle, ModelEntry


@dataclass(frozen=True, kw_only=True)
class FeatureDraftCheckpoint(Checkpoint):
    """A feature draft; ``config`` is the config of its transformer layer."""

    features: FeatureDraftConfig

    @property
    def family(self) -> str:
        return FEATURE_FAMILY

    @property
    def names_proposed(self) -> bool:
        """See the base: d2t names them."""
        return True


def has_feature_draft(files: CheckpointFiles) -> bool:
    """Return whether files are those of a feature draft, in either published layout."""
    return files.gguf_file is None and is_feature_draft(files.folder)


def read_feature_draft(files: CheckpointFiles) -> Checkpoint:
    """Return a feature draft; ``paired_features`` adds settings of its target."""
    role, folder = files.role, files.folder
    if role != "draft":
        raise ExportError(
            f"the {role} at {folder} is a feature draft (EAGLE), which works only with its target; "
            f"give it as the draft, and the model that it was trained for as the {role}"
        )
    features = read_feature_config(folder)
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
    """Return target and draft with agreed features and tokens; raise ExportError if they differ."""
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
    """Return a draft aligned with the target of a bundle; raises like ``paired_features``."""
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
    """Raise ExportError unless the target of a bundle returns what a draft reads."""
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
