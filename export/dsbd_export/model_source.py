"""Sources of the models that are exported: how each is loaded, referenced and captured.

A new kind of model is a class with these methods, and a row of ``source_of``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from dsbd_export.capture.cache_probe import largest_values, probed_caches
from dsbd_export.capture.forest_graph import capture_forest_graph, prepare_for_capture
from dsbd_export.capture.graph_checks import check_contract
from dsbd_export.capture.replacements import choose_rope
from dsbd_export.capture.target_features import with_features
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.checkpoints.model_loading import load_model, reference_dtype
from dsbd_export.draft_vocabulary import cut_head, without_others
from dsbd_export.encoder_decoder.attention import has_distance_bias, take_over_source_attention
from dsbd_export.encoder_decoder.graph import (
    capture_decoder_graph,
    capture_encoder_graph,
    decoder_names,
)
from dsbd_export.encoder_decoder.reference import (
    probed_sources,
    source_cases,
    with_own_source,
)
from dsbd_export.feature_draft.graph import capture_feature_graph
from dsbd_export.feature_draft.reference import (
    feature_cases,
    feature_logits,
    feature_references,
    largest_feature_values,
)
from dsbd_export.feature_draft.weights import load_feature_draft
from dsbd_export.pair import resize_vocabulary
from dsbd_export.parity_cases import (
    ComputeIn,
    ForestCase,
    Heard,
    Reference,
    reference_logits,
    references,
    text_reference,
)
from dsbd_export.passes.optimize import optimize_graph
from dsbd_export.progress import Report
from dsbd_export.quantization.calibration import calibration_case
from dsbd_export.quantization.product_rows import RowsOfProducts, observed_rows
from dsbd_runtime.parts.cache_entries import equal_caches


class ModelSource(Protocol):
    """A model in memory: the checkpoint's weights, and what is computed of them before and after.

    The methods are called once each, in this order; before the last the weights
    are converted to the type of the engine.
    """

    def load(self, dtype: str, report: Report) -> Any:
        """Return the module, with weights as an engine of ``dtype`` is compared with."""

    def probed(self, model: Any, dtype: str) -> Checkpoint:
        """Return the checkpoint with what a run tells: what an engine of ``dtype`` caches."""

    def references(self, model: Any) -> list[Reference]:
        """Return its own logits, for parity."""

    def logits_in_float64(self, model: Any, case: ForestCase) -> NDArray[np.float64]:
        """Return its logits of one of these cases by the same code in float64, (R, V).

        Called of models that are loaded once more for it alone.
        """

    def product_rows(self, model: Any, texts: Sequence[str]) -> RowsOfProducts:
        """Return rows of its products for int8 rows, seen over texts; see ``calibration_case``."""

    def largest_values(self, model: Any) -> dict[int, NDArray[np.float32]]:
        """Return the largest values of every layer that attends, for sums in integers."""

    def capture(self, model: Any, report: Report) -> ir.Model:
        """Return its graph, as the contract has it."""

    def capture_encoder(self, model: Any, report: Report) -> ir.Model | None:
        """Return the graph of its encoder, None without one."""


class DecoderSource:
    """A causal language model of transformers."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._heard: Heard = {}

    def load(self, dtype: str, report: Report) -> Any:
        """See ModelSource."""
        self._heard.clear()
        model = load_model(self._checkpoint, reference_dtype(self._checkpoint, dtype), report)
        resize_vocabulary(model, self._checkpoint)
        choose_rope(model, self._checkpoint.context_length)
        return model

    def probed(self, model: Any, dtype: str) -> Checkpoint:
        """See ModelSource."""
        checkpoint = self._checkpoint
        return replace(checkpoint, caches=probed_caches(model, checkpoint, dtype))

    def references(self, model: Any) -> list[Reference]:
        """See ModelSource; a draft that proposes some tokens only returns no others."""
        checkpoint = self._checkpoint
        text = with_features(text_reference(model, checkpoint), model, checkpoint)
        proposed = checkpoint.proposed_tokens
        return [without_others(each, proposed) for each in (*references(model, checkpoint), text)]

    def logits_in_float64(self, model: Any, case: ForestCase) -> NDArray[np.float64]:
        """See ModelSource."""
        model.set_experts_implementation("eager")  # grouped products have no float64
        logits = reference_logits(model, case, torch.float64, self._heard)
        found = without_others(
            Reference(case=case, logits=logits), self._checkpoint.proposed_tokens
        )
        return found.logits

    def product_rows(self, model: Any, texts: Sequence[str]) -> RowsOfProducts:
        """See ModelSource."""
        with observed_rows(model) as found:
            reference_logits(model, calibration_case(self._checkpoint, texts))
        return found

    def largest_values(self, model: Any) -> dict[int, NDArray[np.float32]]:
        """See ModelSource."""
        return largest_values(model, self._checkpoint)

    def capture(self, model: Any, report: Report) -> ir.Model:
        """See ModelSource."""
        checkpoint = self._checkpoint
        if checkpoint.proposed_tokens is not None:
            cut_head(model, checkpoint.proposed_tokens)
        form = prepare_for_capture(model)
        graph = capture_forest_graph(model, checkpoint, form, report)
        report(f"{checkpoint.role}: optimizing the graph")
        optimize_graph(graph)
        check_contract(graph, checkpoint, form)
        return graph

    def capture_encoder(self, model: Any, report: Report) -> ir.Model | None:
        """See ModelSource."""
        return None


class EncoderDecoderSource(DecoderSource):
    """An encoder-decoder of transformers, whose decoder is the engine."""

    def probed(self, model: Any, dtype: str) -> Checkpoint:
        """See ModelSource; the cross rows too."""
        return probed_sources(model, self._checkpoint, dtype)

    def references(self, model: Any) -> list[Reference]:
        """See ModelSource."""
        cases = source_cases(self._checkpoint)
        logits = (reference_logits(model, case, heard=self._heard) for case in cases)
        found = (
            Reference(case=case, logits=each) for case, each in zip(cases, logits, strict=True)
        )
        return [without_others(each, self._checkpoint.proposed_tokens) for each in found]

    def product_rows(self, model: Any, texts: Sequence[str]) -> RowsOfProducts:
        """See ModelSource."""
        with observed_rows(model) as found:
            case = calibration_case(self._checkpoint, texts)
            reference_logits(model, with_own_source(case, self._checkpoint))
        return found

    def capture(self, model: Any, report: Report) -> ir.Model:
        """See ModelSource."""
        checkpoint = self._checkpoint
        if checkpoint.proposed_tokens is not None:
            cut_head(model, checkpoint.proposed_tokens)
        take_over_source_attention(model)
        graph = capture_decoder_graph(model, checkpoint, report)
        report(f"{checkpoint.role}: optimizing the graph")
        optimize_graph(graph)
        has_biases = has_distance_bias(model)
        form = None if has_biases else AttentionForm.NODE
        check_contract(graph, checkpoint, form, decoder_names(checkpoint))
        return graph

    def capture_encoder(self, model: Any, report: Report) -> ir.Model | None:
        """See ModelSource; ``capture`` has prepared the model."""
        checkpoint = self._checkpoint
        take_over_source_attention(model)
        graph = capture_encoder_graph(model, checkpoint, report)
        optimize_graph(graph)
        return graph


class FeatureDraftSource:
    """A feature draft, whose module is ours."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def load(self, dtype: str, report: Report) -> Any:
        """See ModelSource."""
        return load_feature_draft(self._checkpoint)

    def probed(self, model: Any, dtype: str) -> Checkpoint:
        """See ModelSource; the layer is one of two forms whose config tells."""
        layer = self._checkpoint.config
        [cache] = equal_caches(
            1, num_heads=layer.num_key_value_heads, head_dim=layer.head_dim, dtype=dtype
        )
        return replace(self._checkpoint, caches=(cache,))

    def references(self, model: Any) -> list[Reference]:
        """See ModelSource."""
        return feature_references(model, self._checkpoint)

    def logits_in_float64(self, model: Any, case: ForestCase) -> NDArray[np.float64]:
        """See ModelSource."""
        with ComputeIn(torch.float64):
            return feature_logits(model, case)

    def product_rows(self, model: Any, texts: Sequence[str]) -> RowsOfProducts:
        """See ModelSource; ``check_form`` has refused texts."""
        with observed_rows(model) as found:
            feature_logits(model, feature_cases(self._checkpoint)[-1])
        return found

    def largest_values(self, model: Any) -> dict[int, NDArray[np.float32]]:
        """See ModelSource."""
        return largest_feature_values(model, self._checkpoint)

    def capture(self, model: Any, report: Report) -> ir.Model:
        """See ModelSource."""
        return capture_feature_graph(model, self._checkpoint, report)

    def capture_encoder(self, model: Any, report: Report) -> ir.Model | None:
        """See ModelSource."""
        return None


SourceOf = Callable[[Checkpoint], ModelSource]


def source_of(checkpoint: Checkpoint) -> ModelSource:
    """Return where a checkpoint's graph comes from."""
    if checkpoint.encoder is not None:
        return EncoderDecoderSource(checkpoint)
    is_feature_draft = checkpoint.features is not None
    return FeatureDraftSource(checkpoint) if is_feature_draft else DecoderSource(checkpoint)
