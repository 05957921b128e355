"""Export of checkpoints to a bundle: a target with or without a draft."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from dsbd_export.capture.cache_graphs import write_prune_graph
from dsbd_export.capture.forest_graph import ExportContract, ExportPart, Made, joined
from dsbd_export.capture.graph_checks import check_for_tensorrt
from dsbd_export.changed_bundle import writing
from dsbd_export.checkpoints.adapter import report_adapter
from dsbd_export.checkpoints.checkpoint import Checkpoint, limited_threads
from dsbd_export.checkpoints.checkpoint_files import convert_weights
from dsbd_export.config import EXACT, FUSED, GROUPED, INT8_ROWS, ExportConfig, ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.gate.agreement import measured_agreement
from dsbd_export.gate.parity import advice, measured_parity, parity_limit, refusal
from dsbd_export.gate.refused_bundle import keep_refused
from dsbd_export.gate.request_defaults import CheckDefaults, check_request_defaults
from dsbd_export.gate.text_checks import write_text_checks
from dsbd_export.gate.unwritten_bundle import NOT_MEASURED, unwritten_bundle
from dsbd_export.model_source import EngineGraph, ModelSource, SourceOf
from dsbd_export.opening import check_form, check_pair, kind_of, open_pair, source_of
from dsbd_export.pair import context_warning
from dsbd_export.parity_cases import ForestCase
from dsbd_export.parts.draft_vocabulary import shorter_head_advice, with_draft_vocabulary
from dsbd_export.parts.features import default_layers
from dsbd_export.parts.head import check_num_top_logits
from dsbd_export.passes.cuda_graph import use_cuda_operators
from dsbd_export.passes.exact_attention import attend_exactly, without_exact_form
from dsbd_export.passes.merged_products import merge_products, transpose_before_split
from dsbd_export.passes.optimize import group_query_heads
from dsbd_export.passes.webgpu_graph import read_rows_of_sources, use_webgpu_operators
from dsbd_export.progress import MB, Counter, Report, counted
from dsbd_export.quantization.quantize import quantize_graph
from dsbd_export.quantization.row_forms import RowsOfProducts
from dsbd_export.tensorrt.tensorrt_build import build_engines
from dsbd_export.tensorrt.tensorrt_options import build_place
from dsbd_export.tokenizers.tokenizer_files import write_tokenizer_files
from dsbd_export.tool_versions import tool_versions, untried_versions
from dsbd_runtime.bundle_files.bundle import (
    MODEL_FILE,
    PRUNE_FILE,
    Manifest,
    ModelEntry,
    write_manifest,
)
from dsbd_runtime.bundle_files.draft_record import RECORD_FILE, read_record, write_record
from dsbd_runtime.bundle_files.manifest import CUDA, PORTABLE, WEBGPU, entry_by_role
from dsbd_runtime.bundle_files.staging import new_bundle
from dsbd_runtime.parts.attention.cache_entries import attending


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """The manifest of an export, and the folder of its bundle."""

    manifest: Manifest
    output: Path


def export_bundle(
    config: ExportConfig,
    *,
    report: Report,
    source_of: SourceOf = source_of,
    check_defaults: CheckDefaults = lambda _: None,
) -> ExportResult:
    """Export the checkpoints to ``config.output``; ``report`` gets a short line for each stage.

    A bundle is complete or absent: after an error ``config.output`` is unchanged.

    check_defaults: check of request defaults by the runtime that will open the bundle.

    Raises:
        ExportError: an option, a checkpoint, the pair or the result is not usable.
        BundleError: the output cannot be written.
        ProviderError: TensorRT is requested and not installed.
    """
    place = None if config.tensorrt is None else build_place(config.tensorrt)
    for untried in untried_versions(tool_versions()):
        report(untried)
    report("reading the checkpoints")
    target, draft = open_pair(config)
    reads_all = target.encoder is not None and target.encoder.speech is not None
    config = config.for_vocabulary(target.vocab_size, reads_all=reads_all)
    target, draft = _agreed_models(target, draft, config, report)
    if warning := context_warning(target, draft, config.max_context):
        report(warning)
    check_num_top_logits(config.num_top_logits, target.vocab_size)
    with (
        limited_threads(config.num_threads),
        writing(config.output, "free some space or choose another output"),
        new_bundle(config.output) as folder,
    ):
        write_tokenizer_files(target, folder, report)  # early, because the tokenizer may be refused
        check_request_defaults(target, folder, check_defaults)
        write_text_checks(folder, target.bos_token_id)
        target_entry = export_model(target, folder, config, report, source_of)
        draft_entry = None
        if draft is not None:
            draft_entry = export_model(
                draft, folder, config.of_draft, report, source_of, target=target_entry
            )
            agreement = measured_agreement(folder, target_entry, draft_entry, report)
            draft_entry = replace(draft_entry, agreement=agreement)
        if place is not None:
            entries = list(entry_by_role(target_entry, draft_entry).values())
            build_engines(folder, entries, place, config.capacity, report=report)
        report("writing the manifest")
        manifest = write_manifest(
            folder, versions=tool_versions(), target=target_entry, draft=draft_entry
        )
        check_parity(folder, config.output, manifest, {"target": target, "draft": draft})
    return ExportResult(manifest=manifest, output=config.output)


def check_parity(
    folder: Path, output: Path, manifest: Manifest, exported: Mapping[str, Checkpoint | None]
) -> None:
    """Raise ExportError if a complete bundle exceeds its limit; it is kept under another name."""
    for role, checkpoint in exported.items():
        if checkpoint is None:
            continue
        if reason := refusal(checkpoint, manifest.entry_by_role[role].parity):
            raise keep_refused(folder, output, manifest, reason)


def _agreed_models(
    target: Checkpoint, draft: Checkpoint | None, config: ExportConfig, report: Report
) -> tuple[Checkpoint, Checkpoint | None]:
    """Return target and draft with aligned vocabularies and with the parts that are exported."""
    check_pair(target, draft, config)
    target = kind_of(target).as_target(target)
    report_adapter(target.adapter, config.target, report)
    if draft is not None:
        report_adapter(draft.adapter, str(config.draft), report)
    if config.features:
        layers = default_layers(target.config.get_text_config().num_hidden_layers)
        target = replace(target, feature_layers=layers)
    if draft is not None:
        target, draft = kind_of(draft).paired(target, draft, report)
        return target, with_draft_vocabulary(draft, config, report)
    return target, None


def export_model(
    checkpoint: Checkpoint,
    bundle: Path,
    config: ModelOptions,
    report: Report,
    source_of: SourceOf = source_of,
    *,
    target: ModelEntry | None = None,
) -> ModelEntry:
    """Write and check the folder of a model, and return its manifest entry."""
    role, folder = checkpoint.role, bundle / checkpoint.role
    folder.mkdir()
    if target is not None:
        checkpoint = replace(checkpoint, target_encoder=target.encoder, target_given=target.given)
    checkpoint, parts, made = _write_model(
        checkpoint, source_of(checkpoint), folder, config, report, target
    )
    config, wanted = made.options, made.references
    gc.collect()  # the capture leaves cycles with the weights; parity needs their memory
    report(f"{role}: writing the prune graph")
    write_prune_graph(joined(parts), folder / PRUNE_FILE)
    if config.form == WEBGPU:
        read_rows_of_sources(folder / PRUNE_FILE)
    report(f"{role}: comparing with the checkpoint")
    in_float64 = None if config.atol is not None else partial(_in_float64, checkpoint, report)
    limit = parity_limit(config)
    if target is not None and checkpoint.shares_encoder:
        limit = parity_limit(config, target.quantization)
        report(f"{role}: its encoder is the target's, whose outputs it reads")
    judged = made.judged
    parity = measured_parity(judged, checkpoint, wanted, limit, in_float64, report)
    if reason := refusal(checkpoint, parity):
        report(f"warning: {reason}; the export continues, and its result is kept apart")
    elif warning := advice(checkpoint, config, parity):
        report(f"warning: {warning}")
    record = checkpoint.folder / RECORD_FILE  # written by dsbd-distill
    if role == "draft" and record.is_file():
        write_record(folder, read_record(record))
    fields: dict[str, Any] = {"parity": parity}
    for part in parts:
        fields |= part.complete(made)
    return replace(judged.entry(role), **fields)


def _in_float64(
    checkpoint: Checkpoint, report: Report, cases: Sequence[ForestCase]
) -> Iterator[NDArray[np.float64]]:
    """Yield the checkpoint's logits of cases in float64, from a separate copy."""
    phase = f"{checkpoint.role}: computing up to {len(cases)} cases in float64, to tell rounding"
    report(phase)
    source = source_of(checkpoint)
    model = source.load("fp32", report)
    counter = Counter(phase, "cases", report)
    for case in counted(cases, counter):
        yield source.logits_in_float64(model, case)


def _write_model(
    checkpoint: Checkpoint,
    source: ModelSource,
    folder: Path,
    config: ModelOptions,
    report: Report,
    target: ModelEntry | None,
) -> tuple[Checkpoint, list[ExportPart], Made]:
    """Write model.onnx, its weights, and further files of the model's parts."""
    role = checkpoint.role
    report(f"{role}: loading the checkpoint")
    model = source.load(config.dtype, report)
    if advice := shorter_head_advice(model, checkpoint):
        report(advice)
    checkpoint = source.probed(model, config.dtype)
    check_form(checkpoint, config)
    parts = source.parts(config)
    contract = joined(parts)
    report(f"{role}: computing reference logits")
    wanted = source.references(model)
    for part in parts:
        wanted = part.refer(model, wanted)
    is_integer = config.sums_integers and not contract.inexact
    seen = source.largest_values(model) if is_integer else None
    rows = None
    if config.rounds_rows:
        rows = source.product_rows(model, config.calibration_texts)
    convert_weights(model, config.dtype)
    graphs = source.capture(model, parts, report)
    if config.attention_form == EXACT:
        layers = [cache.layer for cache in attending(checkpoint.caches)]
        if missing := contract.inexact or without_exact_form(graphs[0].graph, layers):
            config = _without_exact_attention(checkpoint, missing, config, report)
    passes = _graph_passes(checkpoint, config, seen, rows)
    for graph in graphs:
        _write_graph(graph, passes, checkpoint, folder, config, report)
    _release_weights(model, graphs)
    entry = manifest_entry(checkpoint, config, contract)
    judged = unwritten_bundle(folder.parent, role, entry, target)
    made = Made(folder, wanted, config, judged, report)
    for part in parts:
        part.write(made)
    return checkpoint, parts, made


def _write_graph(
    captured: EngineGraph,
    passes: Sequence[GraphPass],
    checkpoint: Checkpoint,
    folder: Path,
    config: ModelOptions,
    report: Report,
) -> None:
    """Convert a graph to its form and precision, and write it with its weights."""
    role, graph = checkpoint.role, captured.graph
    whose = role if captured.file == MODEL_FILE else f"{role}, {captured.name}"
    for phase, graph_pass in passes:
        report(f"{whose}: {phase}")
        report(f"{whose}: {graph_pass(graph)}")
    if config.quantize == "none" and config.dtype != "fp32" and config.form == PORTABLE:
        check_for_tensorrt(graph, checkpoint)
    phase = f"{role}: saving the {captured.name} and its weights"
    report(phase)
    counter = Counter(phase, MB, report)
    weights = (value.const_value for each in graph.graphs() for value in each.initializers.values())
    total = sum(weight.nbytes for weight in weights if weight is not None)

    def written(_: object, info: ir.external_data.CallbackInfo) -> None:
        counter.done(info.offset, total)  # called before the weight at this offset is written

    ir.save(graph, folder / captured.file, external_data=captured.weights, callback=written)


def _without_exact_attention(
    checkpoint: Checkpoint, missing: str, config: ModelOptions, report: Report
) -> ModelOptions:
    """Return the options with fused attention; ExportError if exact attention was requested.

    missing: why the model has no exact form.
    """
    model = f"the {checkpoint.role} (family {checkpoint.family})"
    if config.attention == EXACT:
        raise ExportError(
            f"attention={EXACT!r} has no form for {model}: {missing}; use attention={FUSED!r}"
        )
    report(
        f"{checkpoint.role}: attention is {FUSED}, not {EXACT} as usual in {config.quantize}: "
        f"{missing}; drafts may decide a near-tie otherwise"
    )
    return replace(config, attention=FUSED)


GraphPass = tuple[str, Callable[[ir.Model], str]]
"""Its description, and a function that changes a graph in place and describes the change."""


def _graph_passes(
    checkpoint: Checkpoint,
    config: ModelOptions,
    seen: dict[int, NDArray[np.float32]] | None,
    rows: RowsOfProducts | None,
) -> list[GraphPass]:
    is_exact = config.attention_form == EXACT

    def attend(graph: ir.Model) -> str:
        if not any(node.op_type == "TensorScatter" for node in graph.graph):
            return "no attention over cached rows"  # an encoder computes its rows once
        layers = [cache.layer for cache in attending(checkpoint.caches)]
        num_exact = attend_exactly(graph, checkpoint.context_length, layers, seen)
        return f"{num_exact} attentions with sums in {'double' if seen is None else 'integers'}"

    def quantize(graph: ir.Model) -> str:
        return str(quantize_graph(graph, config.quantized_form, is_exact=is_exact, rows=rows))

    def take(graph: ir.Model) -> str:
        return use_webgpu_operators(graph, checkpoint.context_length)

    def turn(graph: ir.Model) -> str:
        return f"heads of {transpose_before_split(graph.graph)} layers are transposed at once"

    passes: list[GraphPass] = [
        (
            "merging products",
            lambda graph: f"{merge_products(graph)} groups of products of the same rows merged",
        )
    ]
    if config.attention_form == GROUPED:
        passes.append(
            ("grouping heads", lambda graph: f"{group_query_heads(graph)} attention nodes grouped")
        )
    elif is_exact:
        passes.append(("making sums exact", attend))
    if config.form == CUDA:
        passes.append(("taking operators of CUDA", use_cuda_operators))
    if config.quantized_form != "none":
        passes.append(("quantizing products", quantize))
    # Never on CUDA, whose Split would copy sizes from the host; see ``merged_products``.
    if config.quantization == INT8_ROWS:
        passes.append(("turning heads", turn))
    if config.form == WEBGPU:
        passes.append(("taking operators of WebGPU", take))
    return passes


def _release_weights(model: PreTrainedModel, graphs: Sequence[EngineGraph]) -> None:
    """Free the weights now, because onnxscript's rules are global and keep the last graph."""
    for value in (v for each in graphs for v in each.graph.graph.initializers.values()):
        value.const_value = None
    for parameter in model.parameters():
        parameter.data = torch.empty(0)


def manifest_entry(
    checkpoint: Checkpoint, config: ModelOptions, contract: ExportContract
) -> ModelEntry:
    """Return an engine's entry before its parts complete it and its parity is measured."""
    return ModelEntry(
        family=checkpoint.family,
        vocab_size=checkpoint.vocab_size,
        bos_token_id=checkpoint.bos_token_id,
        eos_token_ids=checkpoint.eos_token_ids,
        context_length=checkpoint.context_length,
        num_layers=len(checkpoint.layer_masks),
        caches=[cache for cache, _ in contract.caches],
        dtype=config.dtype,
        quantization=config.quantized_form,
        form=None if config.form == PORTABLE else config.form,
        bit_exact="observed" if config.attention_form == EXACT else False,
        unread_inputs=checkpoint.unread_inputs,
        adapter=None if checkpoint.adapter is None else checkpoint.adapter.name,
        parity=NOT_MEASURED,
        **contract.entry,
    )
