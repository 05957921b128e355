"""Model sources: load a checkpoint's model, compute its reference results, capture its graphs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import nn

from dsbd_export.capture.caches import largest_values, probed_caches
from dsbd_export.capture.forest_graph import ExportContract, ExportPart, ForestGraph, captured_graph
from dsbd_export.capture.graph_checks import check_contract
from dsbd_export.capture.replacements import choose_rope, prepare_for_capture
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.checkpoints.model_loading import load_model, reference_dtype
from dsbd_export.config import ModelOptions
from dsbd_export.pair import resize_vocabulary
from dsbd_export.parity_cases import (
    ForestCase,
    Heard,
    Reference,
    forest_cases,
    reference_logits,
    text_case,
)
from dsbd_export.parts.alignment import ExportedAlignment, aligned_speech
from dsbd_export.parts.draft_vocabulary import without_others
from dsbd_export.parts.features import ExportedFeatures
from dsbd_export.parts.head import ExportedHead
from dsbd_export.parts.rows import ExportedAttention, ExportedConvolutions, ExportedRecurrences
from dsbd_export.parts.sources import ExportedSources
from dsbd_export.passes.optimize import optimize_graph
from dsbd_export.progress import Report
from dsbd_export.quantization.row_forms import RowsOfProducts, calibration_case, observed_rows
from dsbd_runtime.bundle_files.bundle import (
    ENCODER_FILE,
    ENCODER_WEIGHTS_FILE,
    MODEL_FILE,
    WEIGHTS_FILE,
)
from dsbd_runtime.parts.attention.cache_entries import num_ancestors, recurrent


@dataclass(frozen=True)
class EngineGraph:
    """A captured graph and its files."""

    graph: ir.Model
    file: str = MODEL_FILE
    weights: str = WEIGHTS_FILE
    name: str = "graph"  # name in reports


class ModelSource:
    """Access to a checkpoint's model and data derived from it, before and after conversion."""

    GRAPH = ForestGraph

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._heard: Heard = {}

    def load(self, dtype: str, report: Report) -> Any:
        """Return the module with the weights with which an engine of ``dtype`` is compared."""
        self._heard.clear()
        model = load_model(self._checkpoint, reference_dtype(self._checkpoint, dtype), report)
        resize_vocabulary(model, self._checkpoint)
        choose_rope(model, self._checkpoint.context_length)
        return model

    def probed(self, model: Any, dtype: str) -> Checkpoint:
        """Return the checkpoint with the caches of an engine of ``dtype``, found by a run."""
        caches = probed_caches(model, self._checkpoint, dtype)
        self._checkpoint = replace(self._checkpoint, caches=caches)
        return self._checkpoint

    def parts(self, options: ModelOptions) -> list[ExportPart]:
        """Return the parts of the engine; a subclass adds those of its kind of model.

        They prepare a call and complete a model in this order, because sources change the arguments
        of all other parts, and the head changes the file with which features are compared. The
        order of ``ModelEntry.parts`` is the order in which calls bind their tensors.
        """
        checkpoint = self._checkpoint
        kinds: list[tuple[object, Callable[[Checkpoint], ExportPart]]] = [
            (True, ExportedAttention),
            (num_ancestors(checkpoint.caches), ExportedConvolutions),
            (recurrent(checkpoint.caches), ExportedRecurrences),
            (checkpoint.feature_layers, ExportedFeatures),
            (True, ExportedHead),
            (checkpoint.encoder, ExportedSources),
            (aligned_speech(checkpoint), ExportedAlignment),
        ]
        return [kind(checkpoint) for has_kind, kind in kinds if has_kind]

    def references(self, model: Any) -> list[Reference]:
        """Return the model's logits of the parity cases; a draft's cover the tokens it proposes."""
        return [self._reference(model, case, torch.float32) for case in self._cases()]

    def logits_in_float64(self, model: Any, case: ForestCase) -> NDArray[np.float64]:
        """Return the logits of one of the cases, (R, V), computed by the same code in float64."""
        return self._reference(model, case, torch.float64).logits

    def product_rows(self, model: Any, texts: Sequence[str]) -> RowsOfProducts:
        """Return statistics of the rows of products over texts; see ``calibration_case``."""
        with observed_rows(model) as rows:
            self._logits(model, self._calibration_case(texts), torch.float32)
        return rows

    def _reference(self, model: Any, case: ForestCase, dtype: torch.dtype) -> Reference:
        reference = Reference(case=case, logits=self._logits(model, case, dtype))
        return without_others(reference, self._checkpoint.proposed_tokens)

    def _logits(self, model: Any, case: ForestCase, dtype: torch.dtype) -> NDArray[Any]:
        """Return the checkpoint's logits of a case, (R, V) of ``dtype``."""
        if dtype is torch.float64:
            model.set_experts_implementation("eager")  # grouped products have no float64
        return reference_logits(model, case, dtype, self._heard)

    def _cases(self) -> list[ForestCase]:
        return [*forest_cases(self._checkpoint), text_case(self._checkpoint)]

    def _calibration_case(self, texts: Sequence[str]) -> ForestCase:
        return calibration_case(self._checkpoint, texts)

    def largest_values(self, model: Any) -> dict[int, NDArray[np.float32]]:
        """Return the largest values of every layer with attention, for sums in integers."""
        return largest_values(model, self._checkpoint)

    def capture(self, model: Any, parts: Sequence[ExportPart], report: Report) -> list[EngineGraph]:
        """Return the graph of the engine with its parts, and further graphs of the model."""
        checkpoint, form = self._checkpoint, self._prepare(model)
        module = self.GRAPH(model, parts, form)
        graph = captured_graph(module, checkpoint, module.contract, report)
        report(f"{checkpoint.role}: optimizing the graph")
        optimize_graph(graph)
        check_contract(graph, module.contract, form)
        return [EngineGraph(graph)]

    def capture_encoder(
        self, module: nn.Module, contract: ExportContract, report: Report
    ) -> EngineGraph:
        """Return the graph of an encoder, which is captured after the engine's graph."""
        encoder = captured_graph(
            module, self._checkpoint, contract, report, "capturing the encoder"
        )
        optimize_graph(encoder)
        return EngineGraph(encoder, ENCODER_FILE, ENCODER_WEIGHTS_FILE, "encoder")

    def _prepare(self, model: Any) -> AttentionForm | None:
        """Replace parts of a model that a graph cannot express; return its form of attention."""
        return prepare_for_capture(model)


SourceOf = Callable[[Checkpoint], ModelSource]
