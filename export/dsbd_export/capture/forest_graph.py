"""The forest graph: a checkpoint captured as one ONNX graph, with its external cache.

Every update of the cache becomes TensorScatter nodes, straight from a graph input to a graph
output.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from dsbd_export.capture.latent_attention import absorb_expansions
from dsbd_export.capture.path_convolutions import PathConvolutions
from dsbd_export.capture.path_recurrences import (
    Checkpoints,
    PastRows,
    PathRows,
    Recurrence,
    path_outputs,
    replaced_recurrences,
)
from dsbd_export.capture.replacements import (
    ReplaceTorchFunctions,
    additive_mask,
    fix_rope,
    fix_sparsity,
    take_over_attention,
    use_dense_experts,
)
from dsbd_export.capture.target_features import LayerInputs
from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.checkpoints.model_config import MASK_BY_LAYER_TYPE
from dsbd_export.checkpoints.model_loading import cache_name
from dsbd_export.checkpoints.weights import TORCH_DTYPES
from dsbd_export.config import OPSET
from dsbd_export.draft_vocabulary import spread
from dsbd_export.errors import ExportError, own_error_in, reason_of
from dsbd_export.passes.optimize import fuse_norms
from dsbd_export.progress import Counter, PrintedSteps, Report, to_stdout
from dsbd_runtime.parts.attention_rows import INPUT_IDS, POSITION_IDS, WRITE_INDICES
from dsbd_runtime.parts.cache_entries import (
    ATTENTION_ROWS,
    CONVOLUTION_ROWS,
    RECURRENT_ROWS,
    CacheEntry,
    num_ancestors,
    parts_of,
    past_name,
    present_name,
    recent,
    recurrent,
)
from dsbd_runtime.parts.feature_memory import FEATURE_ROWS, FEATURES
from dsbd_runtime.parts.head import LOGIT_ROWS, LOGITS
from dsbd_runtime.parts.recent_rows import (
    ANCESTORS,
    CHECKPOINT_ROWS,
    RECENT_MASK,
    RECENT_WRITE_INDICES,
    ROW_PLACES,
)

# How much of a capture has passed when torch.onnx.export prints a step, and when its own part ends:
# of 24 layers, 30 s.
_SHARE_BY_STEP = {"Run decompositions...": 0.29, "Translate the graph into ONNX...": 0.77}
_SHARE_BEFORE_OPTIMIZING = 0.83

LayerCache = tuple[Tensor, ...]  # the parts of one layer's cache, (1, heads, rows, width) each


@dataclass(frozen=True)
class RecentTensors:
    """What convolutions and recurrences need of the inputs of the graph.

    Attributes:
        write_indices: first of the new rows among the recent ones.
        convolutions: of a model that has some.
        paths: of a model with recurrences.
        states: by layer, those of the checkpoints and the decays at them.
    """

    write_indices: Tensor
    convolutions: PathConvolutions | None
    paths: PathRows | None
    states: Mapping[int, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, checkpoint: Checkpoint, further: Mapping[str, Tensor]) -> RecentTensors | None:
        """Return those of a model, of its further inputs by name; None without recent rows."""
        if RECENT_WRITE_INDICES not in further:
            return None
        write_indices = further[RECENT_WRITE_INDICES]
        paths = None
        if RECENT_MASK in further:
            checkpoints = Checkpoints(further[CHECKPOINT_ROWS], further[ROW_PLACES])
            paths = PathRows(further[RECENT_MASK][0, 0], write_indices, checkpoints)
        states = {}
        for entry in recurrent(checkpoint.caches):
            state, decay = (further[name] for name in entry.states)
            states[entry.layer] = state, decay
        ancestors = further.get(ANCESTORS)
        convolutions = None if ancestors is None else PathConvolutions(ancestors)
        return cls(write_indices, convolutions, paths, states)


class ForestCache(Cache):  # type: ignore[misc]  # transformers has no types
    """The external cache of the graph: ``present`` is ``past`` with the new rows scattered in."""

    def __init__(
        self,
        past: Mapping[tuple[int, str], LayerCache],
        write_indices: Tensor,
        recent: RecentTensors | None = None,
    ) -> None:
        """Take the caches by layer and kind, and what convolutions and recurrences need."""
        super().__init__(layers=[])
        self._past = past
        self._write_indices = write_indices
        self._recent = recent
        self._present: dict[tuple[int, str], LayerCache] = {}
        self._recurrent_layer = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> LayerCache:
        """Return keys and values of one layer, (1, Hkv, C, D): the old rows and the S new ones.

        key_states, value_states: (1, Hkv, S, D).
        """
        past = self._unwritten(layer_idx, ATTENTION_ROWS)
        new = key_states, value_states
        present = tuple(
            self._scatter(layer_idx, self._write_indices, *pair)
            for pair in zip(past, new, strict=True)
        )
        self._present[layer_idx, ATTENTION_ROWS] = present
        return present

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: what a convolution has read before are rows of the cache."""

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> Tensor:
        """Keep the inputs of a layer's convolution, and give it the rows of all paths.

        conv_states: (1, W, S). Returned in the precision of the cache (constants that are wider may
        have widened them): the convolution that is called next looks at ``PathConvolutions``.
        """
        (past,) = self._unwritten(layer_idx, CONVOLUTION_ROWS)
        conv_states = conv_states.to(past.dtype)
        recent = self._recent
        assert recent is not None  # as the layer was one when its cache was probed
        assert recent.convolutions is not None
        new = conv_states.transpose(1, 2)[:, None]
        rows = self._scatter(layer_idx, recent.write_indices, past, new)
        self._present[layer_idx, CONVOLUTION_ROWS] = (rows,)
        recent.convolutions.read(rows, conv_states)
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: a recurrence is over rows of the cache; the next one is this layer's."""
        self._recurrent_layer = layer_idx

    def update_recurrent_state(self, *_: object, **__: object) -> None:
        """Keep no state: ``recurrent_outputs`` has kept rows."""

    def recurrent_outputs(self, recurrence: Recurrence) -> Tensor:
        """Return the outputs of a layer's recurrence, (H, S, Dv), and keep its rows."""
        layer = self._recurrent_layer
        past = self._unwritten(layer, RECURRENT_ROWS)
        recent = self._recent
        assert recent is not None  # as the layer was one when its cache was probed
        assert recent.paths is not None
        outputs, present = path_outputs(
            recurrence,
            recent.paths,
            PastRows(past, *recent.states[layer]),
            partial(self._scatter, layer, recent.write_indices),
        )
        self._present[layer, RECURRENT_ROWS] = present
        return outputs

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions come in from outside, nothing may be counted here."""
        return 0

    def present(self) -> list[LayerCache]:
        """Return the updated caches in their order."""
        if silent := [layer for layer, kind in self._past if (layer, kind) not in self._present]:
            raise ExportError(f"layers {silent} write no cache, though they have before")
        return [self._present[place] for place in self._past]

    def _unwritten(self, layer: int, kind: str) -> LayerCache:
        """Return what a layer has kept before this call, of one kind."""
        if (layer, kind) in self._present:
            raise ExportError(f"layer {layer} writes its cache twice; the family is not known")
        if (layer, kind) not in self._past:
            raise ExportError(f"layer {layer} writes a cache that it did not have before")
        return self._past[layer, kind]

    def _scatter(self, layer: int, write_indices: Tensor, past: Tensor, new: Tensor) -> Tensor:
        if (past.shape[1], past.shape[3]) != (new.shape[1], new.shape[3]):
            raise ExportError(
                f"layer {layer} caches {new.shape[1]} heads of {new.shape[3]}, expected "
                f"{past.shape[1]} of {past.shape[3]} as before"
            )
        return torch.onnx.ops.symbolic(
            "TensorScatter",
            [past, new, write_indices],
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
        self._checkpoint = checkpoint
        self._masks = checkpoint.masks
        self._attends = any(checkpoint.layer_masks)
        self._places = [(cache.layer, cache.kind) for cache in checkpoint.caches]
        self._kinds = {cache.kind for cache in checkpoint.caches}
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
        past: list[LayerCache],
        further: list[Tensor] | None = None,
    ) -> tuple[Tensor | list[LayerCache], ...]:
        """Return the logits (R, V) in float32, the caches with the S new rows, and features."""
        if self._form is AttentionForm.OWN:
            masks = [additive_mask(mask, self.model.dtype) for mask in masks]
        rest = dict(zip(further_names(self._checkpoint), further or (), strict=True))
        recent = RecentTensors.of(self._checkpoint, rest)
        convolutions = None if recent is None else recent.convolutions
        cache = ForestCache(dict(zip(self._places, past, strict=True)), write_indices, recent)
        with (
            ReplaceTorchFunctions(
                None if convolutions is None else {F.conv1d: convolutions.convolved}
            ),
            replaced_recurrences(self.model, cache.recurrent_outputs),
            LayerInputs(self.model, self._feature_layers) as inputs,
        ):
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
        return (*returned, inputs.rows(rest[FEATURE_ROWS])) if FEATURE_ROWS in rest else returned

    def _mask_argument(self, masks: list[Tensor]) -> Tensor | dict[str, Tensor | None] | None:
        """Return the masks as ``generate`` hands ready-made ones to a model.

        One tensor where all layers share it, else a dict by layer type. Four-dimensional masks
        reach the attention function untouched. No mask reaches a convolution or a recurrence, which
        would take it for one of padded tokens.
        """
        if not self._attends:
            return None
        if len(masks) == 1 and self._kinds == {ATTENTION_ROWS}:
            return masks[0]
        mask_by_name = dict(zip(self._masks, masks, strict=True))
        return {
            kind: None if name is None else mask_by_name.get(name, masks[0])
            for kind, name in MASK_BY_LAYER_TYPE.items()
        }


def input_names(checkpoint: Checkpoint) -> list[str]:
    """Return the inputs of the forest graph in their order."""
    names = [INPUT_IDS, POSITION_IDS, *checkpoint.masks, WRITE_INDICES, LOGIT_ROWS]
    return [*names, *_cache_names(checkpoint, past_name), *further_names(checkpoint)]


def further_names(checkpoint: Checkpoint) -> list[str]:
    """Return the inputs that only some models have, in their order."""
    names = [RECENT_WRITE_INDICES] if recent(checkpoint.caches) else []
    names += [ANCESTORS] if num_ancestors(checkpoint.caches) else []
    if entries := recurrent(checkpoint.caches):
        names += [RECENT_MASK, CHECKPOINT_ROWS, ROW_PLACES]
        names += [name for entry in entries for name in entry.states]
    return names if checkpoint.feature_layers is None else [*names, FEATURE_ROWS]


def output_names(checkpoint: Checkpoint) -> list[str]:
    """Return the outputs of the forest graph in their order."""
    names = [LOGITS, *_cache_names(checkpoint, present_name)]
    return names if checkpoint.feature_layers is None else [*names, FEATURES]


def _cache_names(checkpoint: Checkpoint, name_of: Callable[[int, str], str]) -> list[str]:
    return [name_of(cache.layer, part) for cache, part in parts_of(checkpoint.caches)]


def prepare_for_capture(model: PreTrainedModel) -> AttentionForm:
    """Give ``model`` the parts that a graph can hold, in place; return how it attends then."""
    fix_rope(model)
    fix_sparsity(model)
    use_dense_experts(model)
    absorb_expansions(model)
    return take_over_attention(model)


def capture_forest_graph(
    model: PreTrainedModel, checkpoint: Checkpoint, form: AttentionForm, report: Report
) -> ir.Model:
    """Return the forest graph of a model that was prepared, attending by ``form``."""
    arguments, dynamic_shapes = _example(checkpoint)
    return captured_graph(
        ForestGraph(model, checkpoint, form),
        checkpoint,
        GraphNames(input_names(checkpoint), output_names(checkpoint)),
        arguments,
        dynamic_shapes,
        report,
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
    report: Report,
    phase: str = "capturing the graph",
) -> ir.Model:
    """Return the graph of a module, captured with example arguments.

    Raises:
        ExportError: the module does what no graph can hold.
    """
    phase = f"{checkpoint.role}: {phase}"
    report(phase)
    counter = Counter(phase, "", to_stdout(report, sys.stdout))
    steps = PrintedSteps(_SHARE_BY_STEP, counter)
    with quiet_libraries(), torch.no_grad(), contextlib.redirect_stdout(steps):
        try:
            program = torch.onnx.export(
                module.eval(),
                arguments,
                input_names=names.inputs,
                output_names=names.outputs,
                dynamic_shapes=dynamic_shapes,
                opset_version=OPSET,
                dynamo=True,
                verbose=True,  # prints its steps
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
    counter.passed(_SHARE_BEFORE_OPTIMIZING)
    program.optimize()
    return program.model


def empty_caches(
    caches: Sequence[CacheEntry], capacity: int, num_recent: int = 0
) -> list[LayerCache]:
    """Return the caches of each cached layer, zeros, for an example."""
    return [
        tuple(
            torch.zeros(
                cache.shape(part, num_recent if cache in recent(caches) else capacity),
                dtype=TORCH_DTYPES[cache.dtype],
            )
            for part in cache.parts
        )
        for cache in caches
    ]


def _example(checkpoint: Checkpoint) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return example arguments of ``ForestGraph.forward`` and which of their axes are dynamic."""
    num_masks = len(checkpoint.masks)
    num_nodes, capacity, num_recent, num_logits = 5, 13, 11, 3
    nodes, rows, recent_rows, logits = (
        torch.export.Dim(name, min=low) for name, low in (("S", 1), ("C", 1), ("M", 1), ("R", 0))
    )
    mask = torch.ones(1, 1, num_nodes, capacity, dtype=torch.bool)
    caches = empty_caches(checkpoint.caches, capacity, num_recent)
    arguments = (
        torch.zeros(1, num_nodes, dtype=torch.int64),
        torch.arange(num_nodes)[None],
        [mask.clone() for _ in range(num_masks)],
        torch.tensor([3]),
        torch.arange(num_logits),
        caches,
    )
    is_recent = [cache in recent(checkpoint.caches) for cache in checkpoint.caches]
    dynamic_shapes = (
        {1: nodes},
        {1: nodes},
        [{2: nodes, 3: rows}] * num_masks,
        None,
        {0: logits},
        [
            tuple({2: recent_rows if is_last else rows} for _ in cache)
            for cache, is_last in zip(caches, is_recent, strict=True)
        ],
    )
    examples = _further_examples(checkpoint, num_nodes, num_recent, nodes, recent_rows)
    if not examples:  # an empty argument would take the axes their names
        return arguments, dynamic_shapes
    further, shapes = zip(*(examples[name] for name in further_names(checkpoint)), strict=True)
    return (*arguments, list(further)), (*dynamic_shapes, list(shapes))


def _further_examples(
    checkpoint: Checkpoint, num_nodes: int, num_recent: int, nodes: Any, recent_rows: Any
) -> dict[str, tuple[Tensor, dict[int, Any] | None]]:
    """Return an example of each of ``further_names``, and which of its axes are dynamic."""
    names = further_names(checkpoint)
    num_checkpoints, num_places = 2, 4
    checkpoints, places, features = (
        torch.export.Dim(name, min=low) for name, low in (("B", 1), ("L", 1), ("F", 0))
    )
    num_above = num_ancestors(checkpoint.caches)
    examples: dict[str, tuple[Tensor, dict[int, Any] | None]] = {
        RECENT_WRITE_INDICES: (torch.tensor([2]), None),
        ANCESTORS: (torch.zeros(num_nodes, num_above, dtype=torch.int64), {0: nodes}),
        RECENT_MASK: (
            torch.ones(1, 1, num_nodes, num_recent, dtype=torch.bool),
            {2: nodes, 3: recent_rows},
        ),
        CHECKPOINT_ROWS: (
            torch.zeros(num_checkpoints, num_places, dtype=torch.int64),
            {0: checkpoints, 1: places},
        ),
        ROW_PLACES: (torch.arange(num_nodes), {0: nodes}),
        FEATURE_ROWS: (torch.arange(4), {0: features}),
    }
    for entry in recurrent(checkpoint.caches):
        for name, shape in entry.states.items():
            examples[name] = torch.zeros(num_checkpoints, *shape), {0: checkpoints}
    return {name: examples[name] for name in names}
