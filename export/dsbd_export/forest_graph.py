"""The forest graph: a checkpoint captured as one ONNX graph, with its external cache.

Every update of the cache becomes TensorScatter nodes, straight from a graph input to a graph
output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from dsbd_export.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.config import OPSET
from dsbd_export.draft_vocabulary import spread
from dsbd_export.errors import ExportError, own_error_in, reason_of
from dsbd_export.families import AttentionForm
from dsbd_export.model_config import MASK_BY_LAYER_TYPE
from dsbd_export.model_loading import cache_name
from dsbd_export.optimize import fuse_norms
from dsbd_export.replacements import (
    ReplaceTorchAttention,
    additive_mask,
    fix_rope,
    fix_sparsity,
    take_over_attention,
    use_dense_experts,
)
from dsbd_export.target_features import LayerInputs
from dsbd_export.weights import TORCH_DTYPES
from dsbd_runtime.graph import (
    CACHE_PARTS,
    FEATURE_ROWS,
    FEATURES,
    INPUT_IDS,
    LOGIT_ROWS,
    LOGITS,
    POSITION_IDS,
    WRITE_INDICES,
    past_name,
    present_name,
)

CachePair = tuple[Tensor, Tensor]  # key and value of one layer, (1, Hkv, C, width) each


class ForestCache(Cache):  # type: ignore[misc]  # transformers has no types
    """The external cache of the graph: ``present`` is ``past`` with the new rows scattered in."""

    def __init__(self, past: Mapping[int, CachePair], write_indices: Tensor) -> None:
        super().__init__(layers=[])
        self._past = past
        self._write_indices = write_indices
        self._present: dict[int, CachePair] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> CachePair:
        """Return keys and values of one layer, (1, Hkv, C, D): the old rows and the S new ones.

        key_states, value_states: (1, Hkv, S, D).
        """
        if layer_idx in self._present:
            raise ExportError(f"layer {layer_idx} writes its cache twice; the family is not known")
        if layer_idx not in self._past:
            raise ExportError(f"layer {layer_idx} writes a cache that it did not have before")
        past_key, past_value = self._past[layer_idx]
        self._present[layer_idx] = (
            self._scatter(layer_idx, past_key, key_states),
            self._scatter(layer_idx, past_value, value_states),
        )
        return self._present[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions come in from outside, nothing may be counted here."""
        return 0

    def present(self) -> list[CachePair]:
        """Return the updated caches, layer by layer."""
        if silent := [layer for layer in self._past if layer not in self._present]:
            raise ExportError(f"layers {silent} write no cache, though they have before")
        return [self._present[layer] for layer in self._past]

    def _scatter(self, layer: int, past: Tensor, new: Tensor) -> Tensor:
        if (past.shape[1], past.shape[3]) != (new.shape[1], new.shape[3]):
            raise ExportError(
                f"layer {layer} caches {new.shape[1]} heads of {new.shape[3]}, expected "
                f"{past.shape[1]} of {past.shape[3]} as before"
            )
        return torch.onnx.ops.symbolic(
            "TensorScatter",
            [past, new, self._write_indices],
            {"axis": 2, "mode": "linear"},
            dtype=past.dtype,
            shape=past.shape,
            version=OPSET,
        )


class ForestGraph(nn.Module):
    """The module that is captured: the model behind the inputs and outputs of the contract."""

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        form: AttentionForm,
    ) -> None:
        super().__init__()
        self.model = model
        self._masks = checkpoint.masks
        self._cached_layers = [cache.layer for cache in checkpoint.caches]
        self._form = form
        self._cache_name = cache_name(model)
        self._feature_layers = checkpoint.feature_layers or ()
        tokens = checkpoint.proposed_tokens
        self._tokens = None if tokens is None else torch.from_numpy(tokens)
        self._vocab_size = checkpoint.vocab_size

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        masks: list[Tensor],
        write_indices: Tensor,
        logit_rows: Tensor,
        past: list[CachePair],
        feature_rows: Tensor | None = None,
    ) -> tuple[Tensor | list[CachePair], ...]:
        """Return the logits (R, V) in float32, the caches with the S new rows, and features."""
        if self._form is AttentionForm.OWN:
            masks = [additive_mask(mask, self.model.dtype) for mask in masks]
        cache = ForestCache(dict(zip(self._cached_layers, past, strict=True)), write_indices)
        with ReplaceTorchAttention(), LayerInputs(self.model, self._feature_layers) as inputs:
            output = self.model(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=self._mask_argument(masks),
                use_cache=True,
                logits_to_keep=logit_rows,
                **{self._cache_name: cache},
            )
        logits = spread(output.logits.squeeze(0).float(), self._tokens, self._vocab_size)
        returned = logits, cache.present()
        return returned if feature_rows is None else (*returned, inputs.rows(feature_rows))

    def _mask_argument(self, masks: list[Tensor]) -> Tensor | dict[str, Tensor]:
        """Return the masks as ``generate`` hands ready-made ones to a model.

        One tensor where all layers share it, else a dict by layer type. Four-dimensional masks
        reach the attention function untouched.
        """
        if len(masks) == 1:
            return masks[0]
        mask_by_name = dict(zip(self._masks, masks, strict=True))
        return {kind: mask_by_name[name] for kind, name in MASK_BY_LAYER_TYPE.items()}


def input_names(checkpoint: Checkpoint) -> list[str]:
    """Return the inputs of the forest graph in their order."""
    head = [INPUT_IDS, POSITION_IDS, *checkpoint.masks, WRITE_INDICES, LOGIT_ROWS]
    layers = [cache.layer for cache in checkpoint.caches]
    names = head + [past_name(layer, part) for layer in layers for part in CACHE_PARTS]
    return names if checkpoint.feature_layers is None else [*names, FEATURE_ROWS]


def output_names(checkpoint: Checkpoint) -> list[str]:
    """Return the outputs of the forest graph in their order."""
    layers = [cache.layer for cache in checkpoint.caches]
    names = [LOGITS, *(present_name(layer, part) for layer in layers for part in CACHE_PARTS)]
    return names if checkpoint.feature_layers is None else [*names, FEATURES]


def prepare_for_capture(model: PreTrainedModel) -> AttentionForm:
    """Give ``model`` the parts that a graph can hold, in place; return how it attends then."""
    fix_rope(model)
    fix_sparsity(model)
    use_dense_experts(model)
    return take_over_attention(model)


def capture_forest_graph(
    model: PreTrainedModel, checkpoint: Checkpoint, form: AttentionForm
) -> ir.Model:
    """Return the forest graph of a model that was prepared, attending by ``form``."""
    arguments, dynamic_shapes = _example(checkpoint)
    return captured_graph(
        ForestGraph(model, checkpoint, form),
        checkpoint,
        GraphNames(input_names(checkpoint), output_names(checkpoint)),
        arguments,
        dynamic_shapes,
    )


@dataclass(frozen=True)
class GraphNames:
    """Inputs and outputs of a graph, in their order."""

    inputs: list[str]
    outputs: list[str]


def captured_graph(
    module: nn.Module,
    checkpoint: Checkpoint,
    names: GraphNames,
    arguments: tuple[Any, ...],
    dynamic_shapes: tuple[Any, ...],
) -> ir.Model:
    """Return the graph of a module, captured with example arguments.

    Raises:
        ExportError: the module does what no graph can hold.
    """
    with quiet_libraries(), torch.no_grad():
        try:
            program = torch.onnx.export(
                module.eval(),
                arguments,
                input_names=names.inputs,
                output_names=names.outputs,
                dynamic_shapes=dynamic_shapes,
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
                optimize=False,
            )
        except Exception as error:
            reason = own_error_in(error) or reason_of(error)
            raise ExportError(
                f"the {checkpoint.role} (family {checkpoint.family}) cannot be captured: {reason}"
            ) from error
    if program is None:
        raise ExportError(f"torch.onnx.export gave no graph for family {checkpoint.family}")
    # The optimizer drops the addition of anything up to 1e-8 as that of zero, and with it the
    # epsilon of some norms: they are single nodes before.
    fuse_norms(program.model)
    program.optimize()
    return program.model


def empty_caches(checkpoint: Checkpoint, capacity: int) -> list[CachePair]:
    """Return the caches of each cached layer, zeros, for an example."""
    return [
        (
            torch.zeros(cache.shape(CACHE_PARTS[0], capacity), dtype=TORCH_DTYPES[cache.dtype]),
            torch.zeros(cache.shape(CACHE_PARTS[1], capacity), dtype=TORCH_DTYPES[cache.dtype]),
        )
        for cache in checkpoint.caches
    ]


def _example(checkpoint: Checkpoint) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return example arguments of ``ForestGraph.forward`` and which of their axes are dynamic."""
    num_masks = len(checkpoint.masks)
    num_nodes, capacity, num_logits = 5, 13, 3
    nodes, rows, logits = (
        torch.export.Dim(name, min=low) for name, low in (("S", 1), ("C", 1), ("R", 0))
    )
    mask = torch.ones(1, 1, num_nodes, capacity, dtype=torch.bool)
    arguments = (
        torch.zeros(1, num_nodes, dtype=torch.int64),
        torch.arange(num_nodes)[None],
        [mask.clone() for _ in range(num_masks)],
        torch.tensor([3]),
        torch.arange(num_logits),
        empty_caches(checkpoint, capacity),
    )
    dynamic_shapes = (
        {1: nodes},
        {1: nodes},
        [{2: nodes, 3: rows}] * num_masks,
        None,
        {0: logits},
        [({2: rows}, {2: rows})] * len(checkpoint.caches),
    )
    if checkpoint.feature_layers is None:
        return arguments, dynamic_shapes
    features = torch.export.Dim("F", min=0)
    return (*arguments, torch.arange(num_logits + 1)), (*dynamic_shapes, {0: features})
