"""Draft in the checkpoint of its target: a head for multi-token prediction (MTP).

    x = eh_proj([enorm(embedding of the token), hnorm(feature of the token before)])
    own feature = norm(layer(x))
    logits = lm_head(own feature)

Embedding and LM head are the target's. The layer is of the same kind as the target's layers; in a
hybrid target, where other layers are recurrent, it has full attention. The target's feature is its
last hidden state after the final norm. For tokens that the target has not computed, the draft's own
feature is used instead, so that one head drafts several tokens. SGLang (deepseek_nextn.py,
qwen3_5_mtp.py, mimo_v2_flash_nextn.py) and transformers (MtpModel) do the same. vLLM
(deepseek_mtp.py, qwen3_next_mtp.py, glm4_moe_mtp.py, mimo_v2_mtp.py) has one difference: for
DeepSeek's and GLM's heads the own feature is taken before ``norm``. If a checkpoint has several
heads, the first one is used.

The draft is loaded as a model of the target's class with one layer and three more modules.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, cat, nn
from transformers import PreTrainedConfig

from dsbd_export.capture.replacements import choose_rope
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.checkpoint_files import open_weights
from dsbd_export.checkpoints.model_config import layer_masks, model_class_of, window_within
from dsbd_export.checkpoints.model_loading import cache_name, load_model
from dsbd_export.checkpoints.quantized_weights import quantization_of
from dsbd_export.errors import ExportError
from dsbd_export.feature_draft.checkpoint import FeatureDraftCheckpoint, FeatureDraftConfig
from dsbd_export.feature_draft.source import FeatureDraftSource
from dsbd_export.model_source import ModelSource
from dsbd_export.pair import resize_vocabulary
from dsbd_export.progress import Report
from dsbd_runtime.parts.attention.attention_rows import ATTENTION_MASK_SLIDING

MTP = "mtp"
_LAYER = "model.layers.0."  # names in the draft's module
_NORM = "model.norm."
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Names of the published tensors of a head."""

    prefix: str  # {} is the number of the target's layers
    projection: str
    # name in the module, by the beginning of the name after ``prefix`` ("": any other name). None:
    # the tensor is a copy of the target's
    names: Mapping[str, str | None]
    layer_type: str = "full_attention"

    def start(self, config: PreTrainedConfig) -> str:
        return self.prefix.format(config.num_hidden_layers)

    def sought(self, config: PreTrainedConfig) -> str:
        """Return the name of a weight whose presence shows that a head has this layout."""
        return f"{self.start(config)}{self.projection}weight"

    def renamed(self, name: str) -> str | None:
        """Return a tensor's name in the module; ``name``: without the prefix. None: not read."""
        old = next((old for old in self.names if name.startswith(old)), None)
        new = None if old is None else self.names[old]
        return None if old is None or new is None else new + name.removeprefix(old)


_OWN = {name: name for name in ("enorm.", "hnorm.", "eh_proj.")}
_LAYOUTS = (
    _Layout(  # Qwen3.5, Qwen3-Next
        prefix="mtp.",
        projection="fc.",
        names={
            "fc.": "eh_proj.",
            "pre_fc_norm_embedding.": "enorm.",
            "pre_fc_norm_hidden.": "hnorm.",
            "norm.": _NORM,
            "layers.0.": _LAYER,
        },
    ),
    _Layout(  # DeepSeek-V3, GLM-4-MoE
        prefix="model.layers.{}.",
        projection="eh_proj.",
        names={
            **_OWN,
            "shared_head.norm.": _NORM,
            "shared_head.head.": None,
            "embed_tokens.": None,
            "": _LAYER,
        },
    ),
    _Layout(  # MiMo-V2-Flash
        prefix="model.mtp.layers.0.",
        projection="eh_proj.",
        names={
            **_OWN,
            "final_layernorm.": _NORM,
            "pre_mlp_layernorm.": f"{_LAYER}post_attention_layernorm.",
            "": _LAYER,
        },
        layer_type="sliding_attention",
    ),
)


class _MtpConfig(FeatureDraftConfig):
    """Features of a head: the target's output, numbered as the input of a layer after the last."""

    def target_layers(self, num_layers: int) -> tuple[int, ...]:
        return (num_layers,)


@dataclass(frozen=True, kw_only=True)
class MtpCheckpoint(FeatureDraftCheckpoint):
    """The head in the checkpoint of a target."""

    layout: _Layout
    start: str  # beginning of the names of its tensors

    @property
    def family(self) -> str:
        return MTP

    @property
    def names_proposed(self) -> bool:
        return False

    def read_from(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """See Checkpoint; embedding and LM head are the target's."""
        readers: dict[str, Any] = {}
        for name, reader in stored.items():
            if name.startswith(self.start):
                if new := self.layout.renamed(name.removeprefix(self.start)):
                    readers[new] = reader
            elif name.endswith(f".{_EMBEDDING}"):
                readers.setdefault(f"model.{_EMBEDDING}", reader)
            elif name.endswith(_HEAD) and not self.config.tie_word_embeddings:
                readers[_HEAD] = reader
        return readers


def read_mtp_draft(target: Checkpoint) -> MtpCheckpoint:
    """Return the head in a target's checkpoint as a draft; ExportError if there is no head."""
    where = f"the target at {target.source}"
    if model_class_of(target.config) is None or target.encoder is not None:
        raise ExportError(
            f"draft={MTP!r} needs a decoder of transformers; {where} (family {target.family}) is "
            "another model, choose another draft"
        )
    names: list[str] = []
    if target.gguf_file is None and target.ctranslate2 is None:
        with open_weights(target.folder) as weights:
            names = list(weights)
    layout = next((each for each in _LAYOUTS if each.sought(target.config) in names), None)
    if layout is None:
        sought = ", ".join(each.sought(target.config) for each in _LAYOUTS)
        raise ExportError(
            f"{where} has no head for multi-token prediction that draft={MTP!r} could read: its "
            f"safetensors have none of {sought}; choose another draft"
        )
    start = layout.start(target.config)
    has_experts = any(name.startswith(start) and ".experts." in name for name in names)
    config = _layer_config(target, layout, has_experts=has_experts)
    window = window_within(config, target.context_length)
    masks = layer_masks(config, window)
    shared = {field.name: getattr(target, field.name) for field in fields(Checkpoint)}
    changed = {
        "role": "draft",
        "config": config,
        "composite": None,
        "adapter": None,
        "layer_masks": masks,
        "sliding_window": window if ATTENTION_MASK_SLIDING in masks else None,
    }
    features = _MtpConfig(
        layer=config,
        draft_vocab_size=target.vocab_size,
        target_hidden_size=config.hidden_size,
        layers=(target.config.num_hidden_layers,),
    )
    return MtpCheckpoint(**shared | changed, features=features, layout=layout, start=start)


def _layer_config(target: Checkpoint, layout: _Layout, *, has_experts: bool) -> PreTrainedConfig:
    """Return the config of a model that has only the head's layer."""
    whole, config = target.composite or target.config, target.config
    kind = "sparse" if has_experts else "dense"
    by_layer = {
        "layer_types": [layout.layer_type],
        "mlp_layer_types": [kind],
        "first_k_dense_replace": 0 if has_experts else 1,
        "mlp_only_layers": [] if has_experts else [0],
        "decoder_sparse_step": 1,
    }
    changed: dict[str, Any] = {name: by_layer[name] for name in by_layer if hasattr(config, name)}
    changed |= {"num_hidden_layers": 1, "tie_word_embeddings": whole.tie_word_embeddings}
    if (quantization := quantization_of(whole)) is not None:
        changed["quantization_config"] = quantization
    return type(config).from_dict(config.to_dict() | changed)


def draft_class(base: Any) -> Any:
    """Return the module of a draft; ``base``: the class of the target."""

    class MtpDraft(base):  # type: ignore[misc]  # transformers has no types
        """A model of one layer that also reads features."""

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            norm, size = self.get_decoder().norm, config.hidden_size
            self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
            self.eh_proj = nn.Linear(2 * size, size, bias=False)

        def forward(
            self,
            input_ids: Tensor,
            position_ids: Tensor | None = None,
            features: Tensor | None = None,
            attention_mask: Any = None,
            cache: Any = None,
        ) -> tuple[Tensor, Tensor]:
            """Return the LM head's input twice, because it is also the own feature: (B, S, H) each.

            features: (B, S, H); None: zeros. attention_mask, cache: of transformers.
            """
            embeddings, decoder = self.get_input_embeddings()(input_ids), self.get_decoder()
            features = embeddings.new_zeros(embeddings.shape) if features is None else features
            both = cat([self.enorm(embeddings), self.hnorm(features)], dim=-1)
            output = decoder(
                inputs_embeds=self.eh_proj(both),
                position_ids=position_ids,
                attention_mask=attention_mask,
                use_cache=cache is not None,
                **{cache_name(decoder): cache},
            ).last_hidden_state
            return output, output

        def projected(self, target_features: Tensor) -> Tensor:
            return target_features

        def target_logits(self, normed: Tensor) -> Tensor:
            """Return float32 logits (..., V) for normed (..., H)."""
            logits: Tensor = self.lm_head(normed).float()
            return logits

    return MtpDraft


class MtpSource(FeatureDraftSource):
    """A head for multi-token prediction."""

    def load(self, dtype: str, report: Report) -> Any:
        checkpoint = self._checkpoint
        model = load_model(
            checkpoint, report=report, model_class=draft_class(model_class_of(checkpoint.config))
        )
        resize_vocabulary(model, checkpoint)
        choose_rope(model, checkpoint.context_length)
        return model

    def probed(self, model: Any, dtype: str) -> Checkpoint:
        checkpoint = ModelSource.probed(self, model, dtype)
        assert isinstance(checkpoint, FeatureDraftCheckpoint)
        return checkpoint


def mtp_or_feature_source(checkpoint: Checkpoint) -> ModelSource:
    """Return the model source of a feature draft of either kind."""
    is_head = isinstance(checkpoint, MtpCheckpoint)
    return MtpSource(checkpoint) if is_head else FeatureDraftSource(checkpoint)
