"""Source of an encoder-decoder: its decoder is the engine, its encoder a second graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsbd_export.capture.part import ExportPart
from dsbd_export.capture.source_attention import has_distance_bias, take_over_source_attention
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.encoder_decoder.graph import capture_encoder_graph
from dsbd_export.encoder_decoder.reference import probed_sources, source_cases, with_own_source
from dsbd_export.model_source import EngineGraph, ModelSource
from dsbd_export.parity_cases import ForestCase
from dsbd_export.passes.optimize import optimize_graph
from dsbd_export.progress import Report
from dsbd_runtime.bundle_files.bundle import ENCODER_FILE, ENCODER_WEIGHTS_FILE


class EncoderDecoderSource(ModelSource):
    """An encoder-decoder of transformers, whose decoder is the engine."""

    def probed(self, model: Any, dtype: str) -> Checkpoint:
        """See ModelSource; with cross rows."""
        self._checkpoint = probed_sources(model, self._checkpoint, dtype)
        return self._checkpoint

    def _cases(self) -> list[ForestCase]:
        return source_cases(self._checkpoint)

    def _calibration_case(self, texts: Sequence[str]) -> ForestCase:
        return with_own_source(super()._calibration_case(texts), self._checkpoint)

    def capture(self, model: Any, parts: Sequence[ExportPart], report: Report) -> list[EngineGraph]:
        """See ModelSource; with the encoder."""
        graphs = super().capture(model, parts, report)
        self._prepare(model)
        encoder = capture_encoder_graph(model, self._checkpoint, report)
        optimize_graph(encoder)
        return [*graphs, EngineGraph(encoder, ENCODER_FILE, ENCODER_WEIGHTS_FILE, "encoder")]

    def _prepare(self, model: Any) -> AttentionForm | None:
        """See ModelSource; None if masks are parts of biases."""
        take_over_source_attention(model)
        return None if has_distance_bias(model) else AttentionForm.NODE
