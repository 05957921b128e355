"""Features of a target: the hidden states that enter some of its layers, concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsbd_export.capture.forest_graph import (
    Axis,
    CapturedCall,
    Example,
    ExportContract,
    ExportPart,
    Hook,
    Made,
)
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity_engine import ParityEngine, parity_engine
from dsbd_export.parity_cases import ComputeIn, ForestCase, Reference
from dsbd_runtime.parts.feature.feature_memory import FEATURE_ROWS, FEATURES, HostFeatures
from dsbd_runtime.parts.feature.features import FeatureEntry

# By (dtype, quantize): limit of the norm of the error divided by the norm of the features, for the
# text. Hidden states of another layer or row have an error of about 1.
_LIMITS = {("fp32", "none"): 1e-4, ("fp16", "none"): 2e-2, ("bf16", "none"): 5e-2}
_LIMIT_QUANTIZED = 0.4
NUM_LAYERS = 3
"""Number of hidden states in a feature of the published drafts."""


class ExportedFeatures(ExportPart):
    """The hidden states of some nodes, (F, width), for a feature draft."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.feature_layers is not None  # the caller has checked
        self._checkpoint, self._layers = checkpoint, checkpoint.feature_layers

    def contract(self) -> ExportContract:
        rows = Example((Axis("F", 4, min_size=0),))
        layers = list(self._layers)
        hidden_size = int(self._checkpoint.config.get_text_config().hidden_size)
        features = FeatureEntry(width=len(layers) * hidden_size, layers=layers)
        return ExportContract(
            inputs={FEATURE_ROWS: rows}, outputs=(FEATURES,), entry={"features": features}
        )

    def refer(self, model: Any, references: list[Reference]) -> list[Reference]:
        """See ExportPart; the case of real text gets the features of the unmodified model."""
        *others, text = references
        ids = text.case.node_ids
        with LayerInputs(model, self._layers) as inputs, torch.no_grad(), ComputeIn(torch.float32):
            model(
                input_ids=torch.from_numpy(ids[None]),
                use_cache=False,
                logits_to_keep=torch.tensor([0]),
            )
        rows = inputs.rows(torch.arange(len(ids))).float().numpy()
        return [*others, replace(text, features=rows)]

    def hook(self, model: Any, graph: Any) -> Hook:
        def kept(call: CapturedCall) -> LayerInputs:
            inputs = LayerInputs(model, self._layers)
            call.outputs[FEATURES] = lambda: inputs.rows(call.inputs[FEATURE_ROWS])
            return inputs

        return kept

    def complete(self, made: Made) -> dict[str, Any]:
        checkpoint, options = self._checkpoint, made.options
        made.report(f"{checkpoint.role}: comparing its features with the checkpoint")
        (text,) = (reference for reference in made.references if reference.features is not None)
        assert text.features is not None
        with parity_engine(made.judged, checkpoint.role) as engine:
            error = relative_error(engine, text.case, text.features)
        limit = _LIMITS.get((options.dtype, options.quantize), _LIMIT_QUANTIZED)
        if not error <= limit:  # also when it is NaN
            raise ExportError(
                f"parity failed: the features of the {checkpoint.role} (family "
                f"{checkpoint.family}) differ from the checkpoint's by {error:.3g} of their norm, "
                f"the limit is {limit:.3g}; export it without --features"
            )
        return {}


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs the published drafts read: 2, n // 2 and n - 3 of n layers.

    In a model with few layers they are moved apart: 2, 3 and 4 of 6 layers, 0 and 1 of 2 layers.
    """
    if num_layers < NUM_LAYERS:
        return tuple(range(num_layers))
    layers: list[int] = []
    for place, layer in enumerate(sorted((2, num_layers // 2, num_layers - 3))):
        lowest = layers[-1] + 1 if layers else 0
        highest = num_layers - NUM_LAYERS + place
        layers.append(min(max(layer, lowest), highest))
    return tuple(layers)


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the transformer layers of a model; raise ExportError unless it has one list."""
    number = model.config.get_text_config().num_hidden_layers
    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == number
    ]
    inner = {each for other in lists for each in other.modules() if each is not other}
    lists = [each for each in lists if each not in inner]
    if len(lists) != 1:
        raise ExportError(
            f"{type(model).__name__} has {len(lists)} lists of {number} layers, expected one, so "
            "its features cannot be taken; export it without --features"
        )
    return lists[0]


class LayerInputs:
    """Context in which ``seen`` gets the hidden states that enter some layers, (1, S, H) each.

    The number of layers stands for the LM head, whose input are the hidden states after the final
    norm.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self._layers = layers
        self._modules = layers_of(model) if layers else nn.ModuleList()
        self._decoder: Any = model.get_decoder() if layers else None
        self._handles: list[Any] = []
        self.seen: dict[int, Tensor] = {}

    def __enter__(self) -> LayerInputs:
        for layer in self._layers:
            keep = partial(self._keep, layer)
            if layer < len(self._modules):
                handle = self._modules[layer].register_forward_pre_hook(keep, with_kwargs=True)
            else:
                handle = self._decoder.register_forward_hook(partial(self._keep_output, layer))
            self._handles.append(handle)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def rows(self, feature_rows: Tensor) -> Tensor:
        """Return the features of some rows, (F, width); the batch size is one."""
        parts = [self.seen[layer][0].index_select(0, feature_rows) for layer in self._layers]
        return torch.cat(parts, dim=-1)

    def _keep_output(self, layer: int, _module: nn.Module, _args: Any, output: Any) -> None:
        self.seen[layer] = output.last_hidden_state

    def _keep(
        self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            raise ExportError(
                f"the input of {type(module).__name__} {layer} is not a (1, S, H) tensor of "
                "hidden states, so its features cannot be taken; export it without --features"
            )
        self.seen[layer] = hidden


def relative_error(engine: ParityEngine, case: ForestCase, wanted: NDArray[np.float32]) -> float:
    """Return the norm of the error divided by the features' norm; infinite if shapes differ."""
    features = engine.result(case, with_features=True).features
    assert isinstance(features, HostFeatures)  # the engine runs on the CPU and returns features
    if features.array.shape != wanted.shape:
        return float("inf")
    difference = features.array.astype(np.float64) - wanted
    return float(np.linalg.norm(difference) / np.linalg.norm(wanted))
