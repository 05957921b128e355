"""Export of a draft into an existing bundle, in place of its draft if it has one."""

import dataclasses

from dsbd_export.changed_bundle import changed_bundle
from dsbd_export.checkpoints.adapter import report_adapter
from dsbd_export.checkpoints.checkpoint import limited_threads
from dsbd_export.config import DraftConfig
from dsbd_export.gate.agreement import measured_agreement
from dsbd_export.gate.text_checks import write_text_checks
from dsbd_export.model_source import SourceOf
from dsbd_export.opening import check_pair, kind_of, open_draft, source_of
from dsbd_export.pair import context_warning
from dsbd_export.parts.draft_vocabulary import with_draft_vocabulary
from dsbd_export.parts.head import check_num_top_logits
from dsbd_export.pipeline import ExportResult, check_parity, export_model
from dsbd_export.progress import Report
from dsbd_export.tensorrt.tensorrt_build import build_engines, check_buildable, is_engine
from dsbd_export.tensorrt.tensorrt_options import build_place
from dsbd_export.tool_versions import tool_versions, untried_versions
from dsbd_runtime.bundle_files.bundle import (
    TEXT_CHECKS_FILE,
    Bundle,
    ModelEntry,
    open_bundle,
    write_manifest,
)
from dsbd_runtime.bundle_files.manifest import quantize_option
from dsbd_runtime.tensorrt.trt_module import FLAVOURS
from dsbd_runtime.tensorrt.trt_record import find_record, rebuild_command


def export_draft(
    config: DraftConfig, *, report: Report, source_of: SourceOf = source_of
) -> ExportResult:
    """Export a draft into ``config.bundle``; ``report`` gets a short line for each stage.

    The target's files are kept. Only its TensorRT engines are replaced, if ``config`` requires new
    engines. After an error the bundle is unchanged.
    """
    bundle = open_bundle(config.bundle)
    target = bundle.entry("target")
    place = None if config.tensorrt is None else build_place(config.tensorrt)
    if place is not None:
        check_buildable("target", target)
    for untried in untried_versions(tool_versions()):
        report(untried)
    report("reading the checkpoint")
    draft = open_draft(config)
    config = config.for_vocabulary(draft.vocab_size)
    check_pair(target, draft, config)
    report_adapter(draft.adapter, config.draft, report)
    draft = kind_of(draft).added(bundle, draft, report)
    draft = with_draft_vocabulary(draft, config, report)
    if warning := context_warning(target, draft, config.max_context):
        report(warning)
    check_num_top_logits(config.num_top_logits, draft.vocab_size)
    kept = [
        name
        for name in bundle.manifest.files
        if not name.startswith("draft/") and not (place is not None and is_engine(name))
    ]
    with limited_threads(config.num_threads), changed_bundle(bundle, kept) as folder:
        if TEXT_CHECKS_FILE not in kept:  # an older version exported the target
            write_text_checks(folder, target.bos_token_id)
        entry = export_model(draft, folder, config, report, source_of, target=target)
        agreement = measured_agreement(folder, target, entry, report)
        entry = dataclasses.replace(entry, agreement=agreement)
        if place is not None:
            build_engines(folder, [target, entry], place, config.capacity, report=report)
        elif warning := _engine_warning(bundle, entry):
            report(warning)
        report("writing the manifest")
        manifest = write_manifest(folder, versions=tool_versions(), target=target, draft=entry)
        check_parity(folder, config.bundle, manifest, {"draft": draft})
    return ExportResult(manifest=manifest, output=config.bundle)


def _engine_warning(bundle: Bundle, draft: ModelEntry) -> str | None:
    """Return a warning if the target has TensorRT engines and the new draft has none."""
    record = find_record(bundle, "target")
    if record is None:
        return None
    flavour = FLAVOURS[record.flavour]
    if draft.quantization != "none":
        return (
            f"warning: the target has {flavour.name} engines; the draft has none because it is "
            f"quantized ({quantize_option(draft.quantization)}); for {flavour.name} export it with "
            "--quantize none"
        )
    command = rebuild_command(bundle.path, flavour, record.compute_capability, record.capacity)
    return (
        f"warning: the target has {flavour.name} engines, the draft has none; build both with: "
        f"{command}"
    )
