"""Shape and first weights of a draft: a Llama, some layers of the target, or a feature draft.

A feature draft has the layout of the speculators library with the norms of EAGLE 3.1: each hidden
state of the target is normalized before the projection, and the draft's own feature is its
normalized output.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.checkpoints.model_config import normalized_config, num_decoder_layers
from dsbd_export.errors import ExportError, reason_of
from dsbd_export.feature_draft.checkpoint import FeatureDraftConfig
from dsbd_export.feature_draft.model import FeatureDraft
from dsbd_export.parts.features import default_layers

_HEAD_DIM, _WIDE_HEAD_DIM, _WIDE = 32, 64, 512  # from a hidden size of _WIDE on, heads are wide
_HIDDEN_SIZES = [*range(32, _WIDE, 32), *range(_WIDE, 8193, 64)]
_MOST_LAYERS = 16
_DEFAULT_SHARE = 10  # a tenth of the target's parameters
_LAYER = re.compile(r"(?<=\.)(layers|h|blocks?)\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """Sizes of a Llama whose head is its embedding."""

    hidden_size: int
    num_layers: int

    @property
    def intermediate_size(self) -> int:
        return self.hidden_size * 11 // 5 // 32 * 32

    def num_parameters(self, vocab_size: int) -> int:
        size = self.hidden_size
        layer = 4 * size**2 + 3 * size * self.intermediate_size + 2 * size
        return vocab_size * size + self.num_layers * layer + size


def check_shape(num_params: int | None, target_layers: int | None, target: Checkpoint) -> None:
    """Raise ExportError for a shape that the target does not allow, before weights are read.

    target: the target, or the checkpoint whose layers the draft begins with.
    """
    if num_params is not None:
        shape_for(num_params, 0, target.vocab_size)
    if target_layers is not None and target.unread_inputs:
        others = " and ".join(target.unread_inputs)
        raise ExportError(
            f"target_layers={target_layers} is for models that read text alone, but the "
            f"{target.role} (family {target.family}) also has parts for {others}; give params "
            "instead"
        )
    num_layers = num_decoder_layers(target.config)
    if target_layers is not None and target_layers >= num_layers:
        raise ExportError(
            f"target_layers={target_layers} makes no draft: the {target.role} has "
            f"{num_layers} layers; use fewer, such as {max(num_layers // 4, 1)}"
        )


def shape_for(wanted: int | None, num_of_target: int, vocab_size: int) -> DraftShape:
    """Return the largest shallow shape of at most ``wanted`` parameters; see ``largest_shape``."""
    shapes = [
        DraftShape(hidden_size=size, num_layers=min(2 + size // 128, _MOST_LAYERS))
        for size in _HIDDEN_SIZES
    ]
    sizes = [(shape, shape.num_parameters(vocab_size)) for shape in shapes]
    return largest_shape(wanted, num_of_target, sizes, vocab_size)


_Shape = TypeVar("_Shape")


def largest_shape(
    wanted: int | None, num_of_target: int, sizes: Sequence[tuple[_Shape, int]], vocab_size: int
) -> _Shape:
    """Return the last shape of at most ``wanted`` parameters; raise ExportError if all have more.

    sizes: shapes and their parameters, the smallest first.
    """
    least = sizes[0][1]
    max_params = max(num_of_target // _DEFAULT_SHARE, least) if wanted is None else wanted
    if max_params < least:
        raise ExportError(
            f"params={max_params} is too few for a vocabulary of {vocab_size} tokens, whose "
            f"smallest draft has {least}; give at least that many"
        )
    return [shape for shape, size in sizes if size <= max_params][-1]


def head_dim_of(hidden_size: int) -> int:
    """Return the size of an attention head at a width of the draft."""
    return _WIDE_HEAD_DIM if hidden_size >= _WIDE else _HEAD_DIM


def new_draft(
    target: PreTrainedModel, checkpoint: Checkpoint, shape: DraftShape, seed: int
) -> PreTrainedModel:
    """Return a Llama of a shape with the target's tokens, context and projected embedding."""
    torch.manual_seed(seed)
    config = llama_config(
        checkpoint,
        shape.hidden_size,
        shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        tie_word_embeddings=True,
        bos_token_id=checkpoint.bos_token_id,
        eos_token_id=checkpoint.eos_token_ids or None,
    )
    draft = LlamaForCausalLM(config)
    table = target.get_output_embeddings().weight.detach()
    with torch.no_grad():
        draft.get_input_embeddings().weight.copy_(
            projected(table, shape.hidden_size, config.initializer_range)
        )
    return draft


def llama_config(
    checkpoint: Checkpoint, hidden_size: int, intermediate_size: int, **options: Any
) -> LlamaConfig:
    """Return a config with the target's vocabulary, context and base of rotary frequencies."""
    rope = getattr(checkpoint.config, "rope_parameters", None) or {}
    head_dim = head_dim_of(hidden_size)
    return LlamaConfig(
        vocab_size=checkpoint.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_attention_heads=hidden_size // head_dim,
        num_key_value_heads=hidden_size // head_dim,
        head_dim=head_dim,
        max_position_embeddings=checkpoint.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 1e4)},
        **options,
    )


def projected(table: Tensor, size: int, deviation: float) -> Tensor:
    """Return a table of ``size`` columns whose rows differ from each other as in ``table``.

    The columns are the principal directions of ``table``, rotated so that they spread evenly. If
    ``table`` has fewer columns, the others are noise.

    deviation: root mean square of the kept columns.
    """
    centered = table.float() - table.float().mean(0)
    _, directions = torch.linalg.eigh((centered.T @ centered).double())
    kept = directions.flip(1)[:, :size].float()  # (width, at most size), the largest first
    rows = centered @ kept
    rows *= deviation / rows.square().mean().sqrt()
    if (missing := size - rows.shape[1]) > 0:
        rows = torch.cat([rows, deviation * torch.randn(len(rows), missing)], dim=1)
    rotation, _ = torch.linalg.qr(torch.randn(size, size))
    result: Tensor = rows @ rotation
    return result


def kept_layers(num_layers: int, num_kept: int) -> list[int]:
    """Return which layers of a target a draft keeps: evenly spaced, with the first and the last.

    Three of six are [0, 2, 5], one of six is [5].
    """
    if num_kept == 1:
        return [num_layers - 1]
    return [i * (num_layers - 1) // (num_kept - 1) for i in range(num_kept)]


def truncated_target(
    target: PreTrainedModel, checkpoint: Checkpoint, num_kept: int
) -> PreTrainedModel:
    """Return the target with some of its decoder's layers; ExportError if that is impossible."""
    kept = kept_layers(num_decoder_layers(checkpoint.config), num_kept)
    whole, content = checkpoint.composite or checkpoint.config, _truncated_config(checkpoint, kept)
    if whole is not checkpoint.config:
        content = {**whole.to_dict(), "text_config": content}
    decoder, weights = target.get_decoder(), target.state_dict()
    prefix = next(name for name, module in target.named_modules() if module is decoder)
    try:
        with quiet_libraries():
            draft: PreTrainedModel = type(target)(type(whole).from_dict(content)).float()
        names = {name: _name_in_target(name, prefix, kept, weights) for name in draft.state_dict()}
        draft.load_state_dict(
            {name: weights[name_in_target] for name, name_in_target in names.items()}
        )
    except Exception as error:
        raise ExportError(
            f"layers of the {checkpoint.role} (family {checkpoint.family}) make no draft: "
            f"{reason_of(error)}; export the target with a smaller one of its tokenizer as draft"
        ) from error
    return draft


def _name_in_target(name: str, prefix: str, kept: list[int], weights: dict[str, Tensor]) -> str:
    """Return the target's name of a draft's weight; names of the target's decoder have ``prefix``.

    In T5 only the first layer has relative position biases; the draft's first layer gets them.
    """
    layer = _LAYER.search(name) if name.startswith(prefix) else None
    if layer is None:
        return name
    begin, end = f"{name[: layer.start()]}{layer[1]}.", f".{name[layer.end() :]}"
    kept_name = f"{begin}{kept[int(layer[2])]}{end}"
    return kept_name if kept_name in weights else f"{begin}0{end}"


def _truncated_config(checkpoint: Checkpoint, kept: list[int]) -> dict[str, Any]:
    content: dict[str, Any] = checkpoint.config.to_dict()
    content.pop("quantization_config", None)  # weights in memory are plain
    if checkpoint.config.is_encoder_decoder:  # the other counts belong to the encoder
        counts = ("num_decoder_layers", "decoder_layers")
        return content | {name: len(kept) for name in counts if content.get(name) is not None}
    num_layers = num_decoder_layers(checkpoint.config)
    for name, value in content.items():
        if "layer" in name and isinstance(value, list) and len(value) == num_layers:
            content[name] = [value[layer] for layer in kept]
        elif name in ("num_hidden_layers", "n_layer", "num_layers"):
            content[name] = len(kept)
    return content


_LIBRARY_VERSION = "0.3.0"  # version of speculators whose layout is written


@dataclass(frozen=True, kw_only=True)
class FeatureShape:
    """Sizes of a feature draft."""

    hidden_size: int

    @property
    def intermediate_size(self) -> int:
        return self.hidden_size * 3

    def num_parameters(self, vocab_size: int, num_proposed: int, feature_width: int) -> int:
        """Return the number of parameters; embedding and head are separate."""
        size = self.hidden_size
        layer = 7 * size**2 + 3 * size * self.intermediate_size
        norms = 4 * size + feature_width
        return (vocab_size + num_proposed) * size + feature_width * size + layer + norms


def feature_shape(
    wanted: int | None, num_of_target: int, target: Checkpoint, num_proposed: int | None = None
) -> FeatureShape:
    """Return the largest shape of at most ``wanted`` parameters; see ``largest_shape``."""
    width = len(feature_layers(target)) * feature_size(target)
    shapes = [FeatureShape(hidden_size=size) for size in _HIDDEN_SIZES]
    num_head_tokens = target.vocab_size if num_proposed is None else num_proposed
    sizes = [
        (shape, shape.num_parameters(target.vocab_size, num_head_tokens, width)) for shape in shapes
    ]
    return largest_shape(wanted, num_of_target, sizes, target.vocab_size)


def new_feature_draft(
    target: PreTrainedModel,
    checkpoint: Checkpoint,
    shape: FeatureShape,
    seed: int,
    proposed: NDArray[np.int64] | None = None,
    *,
    keeps_embedding: bool = False,
) -> FeatureDraft:
    """Return a feature draft whose embedding and head are the target's, projected.

    proposed: (n,) int64, ascending. Tokens that its head has logits for; None: all.
    keeps_embedding: whether the embedding stays untrained, as in EAGLE-3.
    """
    torch.manual_seed(seed)
    layer = llama_config(
        checkpoint,
        shape.hidden_size,
        shape.intermediate_size,
        num_hidden_layers=1,
        tie_word_embeddings=False,
    )
    draft = FeatureDraft(
        FeatureDraftConfig(
            layer=layer,
            draft_vocab_size=checkpoint.vocab_size if proposed is None else len(proposed),
            target_hidden_size=feature_size(checkpoint),
            layers=feature_layers(checkpoint),
            norm_output=True,
            fc_norm=True,
        )
    )
    table = target.get_output_embeddings().weight.detach().cpu()
    first = projected(table, shape.hidden_size, layer.initializer_range)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(first)
        if proposed is not None:
            tokens = torch.from_numpy(proposed)
            draft.d2t.copy_(tokens - torch.arange(len(tokens)))
            first = first[tokens]
        draft.lm_head.weight.copy_(first)
    if keeps_embedding:
        draft.embed_tokens.weight.requires_grad_(False)
    return draft


def write_feature_draft(draft: FeatureDraft, target: Checkpoint, folder: Path) -> None:
    """Write config and weights, in fp32."""
    features = draft.features
    content: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _LIBRARY_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {
                "name_or_path": target.folder.resolve().name,
                "architectures": list(target.config.architectures or []),
            },
        },
        "draft_vocab_size": features.draft_vocab_size,
        "target_hidden_size": features.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(features.layers or ()),
        "norm_before_residual": features.norm_before_residual,
        "norm_before_fc": features.norm_before_fc,
        "fc_norm": features.fc_norm,
        "norm_output": features.norm_output,
        "tie_word_embeddings": False,
        "transformer_layer_config": features.layer.to_diff_dict(),
    }
    folder.mkdir(parents=True)
    text = json.dumps(content, indent=2, allow_nan=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    weights = {name: value.cpu().contiguous() for name, value in draft.state_dict().items()}
    if (tokens := draft.proposed_tokens()) is None:
        del weights["d2t"]  # the draft proposes all tokens of the target
    else:
        is_proposed = torch.zeros(features.layer.vocab_size, dtype=torch.bool)
        is_proposed[tokens.cpu()] = True
        weights["t2d"] = is_proposed
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def feature_layers(target: Checkpoint) -> tuple[int, ...]:
    """Return the layers of a target whose input hidden states a draft reads."""
    return default_layers(num_decoder_layers(target.config))


def feature_size(target: Checkpoint) -> int:
    """Return the width of one hidden state of a target."""
    width: int = normalized_config(target.config).hidden_size
    return width
