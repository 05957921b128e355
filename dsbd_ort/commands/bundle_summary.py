"""Summary of a bundle as plain data: models, files, TensorRT engines, usable providers."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from dsbd_ort.decoding.native_decoder import is_installed
from dsbd_ort.requests.option_defaults import ModelDefaults
from dsbd_runtime.bundle_files.bundle import (
    ENCODER_FILE,
    MODEL_FILE,
    TEXT_CHECKS_FILE,
    Bundle,
)
from dsbd_runtime.bundle_files.draft_record import RECORD_FILE, read_record
from dsbd_runtime.bundle_files.manifest import PORTABLE, quantize_option
from dsbd_runtime.device.cuda_device import gpu_compute_capability, import_cuda_runtime
from dsbd_runtime.engine.providers import PROVIDERS, Placement, Provider, check_runnable
from dsbd_runtime.errors import BundleError, ProviderError
from dsbd_runtime.loading import check_available
from dsbd_runtime.parts.attention.cache_entries import every_row
from dsbd_runtime.parts.attention.kv_cache import row_bytes
from dsbd_runtime.parts.recent.recent_rows import path_bytes
from dsbd_runtime.tensorrt.trt_module import FLAVOURS, Flavour, import_trt
from dsbd_runtime.tensorrt.trt_record import (
    EngineRecord,
    TrtMachine,
    find_record,
    fitting_record,
    misfits,
)


class Summary(SimpleNamespace):
    """An object that dsbd-inspect --json prints; ``inspect.JSON_FIELDS`` lists its fields."""


def summarize_bundle(bundle: Bundle, *, verified: bool) -> Summary:
    """Return the summary of an opened bundle; ONNX Runtime is used only to list its providers."""
    manifest = bundle.manifest
    files = {name: entry.size for name, entry in manifest.files.items()}
    models = {role: _model_summary(bundle, role) for role in bundle.roles}
    defaults = ModelDefaults.from_bundle(bundle)
    kv_bytes_per_token = sum(model.kv_bytes_per_token for model in models.values())
    record = f"draft/{RECORD_FILE}"
    return Summary(
        bundle=str(bundle.path),
        schema_version=manifest.schema_version,
        verified=verified,
        versions=manifest.versions,
        vocab_size=manifest.target.vocab_size,
        context_length=bundle.context_length,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_bytes_full_context=sum(
            model.kv_bytes_per_token * min(model.context_length, bundle.context_length)
            for model in models.values()
        ),
        target=models["target"],
        draft=models.get("draft"),
        generation_config=defaults.of_file,
        not_built=defaults.not_built,
        has_text_checks=TEXT_CHECKS_FILE in files,
        native_text=manifest.target.native_text,
        has_native_loop=is_installed(),
        total_bytes=sum(files.values()),
        files=files,
        draft_record=read_record(bundle.path / record) if record in files else None,
        engines=[
            _engine_summary(bundle, role, built)
            for role in bundle.roles
            if (built := find_record(bundle, role)) is not None
        ],
        providers=[_provider_summary(provider, bundle) for provider in PROVIDERS],
    )


def _model_summary(bundle: Bundle, role: str) -> Summary:
    entry, files = bundle.entry(role), bundle.manifest.files.items()
    weights = (f"{role}/{MODEL_FILE}", f"{role}/{ENCODER_FILE}")
    kv_bytes_per_token = row_bytes(every_row(entry.caches))

    def fields(*names: str) -> dict[str, Any]:
        return {name: getattr(entry, name) for name in names}

    return Summary(
        **fields("family", "dtype", "quantization"),
        quantize=quantize_option(entry.quantization),
        form=entry.form or PORTABLE,
        **fields("logits", "full_logits", "bit_exact"),
        weight_bytes=sum(file.size for name, file in files if name.startswith(weights)),
        **fields("vocab_size", "context_length", "num_layers", "caches"),
        kv_bytes_per_token=kv_bytes_per_token,
        kv_bytes_full_context=kv_bytes_per_token * entry.context_length,
        kv_bytes_per_path=path_bytes(entry.caches),
        **fields("masks", "sliding_window", "features", "adapter"),
        unread_inputs=entry.unread_inputs or [],
        encoder=entry.encoder,
        agreement=entry.agreement,
        source_bytes_per_token=row_bytes(entry.encoder.cross) if entry.encoder else 0,
        parity=Summary(
            measure=entry.parity.measure,
            value=getattr(entry.parity, entry.parity.measure),
            limit=entry.parity.limit,
            accepted=entry.parity.accepted,
        ),
    )


def _provider_summary(provider: Provider, bundle: Bundle) -> Summary:
    problems = list(dict.fromkeys(_problems(provider, bundle)))
    return Summary(name=provider.name, can_run=not problems, problems=problems)


def _problems(provider: Provider, bundle: Bundle) -> Iterator[str]:
    """Yield the reasons why the provider cannot run the bundle here, each with its fix."""
    try:
        check_available(Placement(provider, 0))
    except ProviderError as error:
        yield str(error)
    for role in bundle.roles:
        try:
            check_runnable(provider, bundle.entry(role), bundle.model_path(role))
        except ProviderError as error:
            yield str(error)
    if provider.backend == "tensorrt":
        flavour = FLAVOURS[provider.name]
        machine = _machine_here(flavour)
        for role in bundle.roles:
            try:
                fitting_record(bundle, role, flavour, machine)
            except BundleError as error:
                yield str(error)


def _machine_here(flavour: Flavour) -> TrtMachine:
    """Return TensorRT's version and the compute capability of the first GPU; None if unknown."""
    try:
        version = str(import_trt(flavour).__version__)
    except ProviderError:
        version = None
    try:
        runtime = import_cuda_runtime(flavour.provider.install_line)
        capability = gpu_compute_capability(runtime, 0)
    except ProviderError:
        capability = None
    return TrtMachine(tensorrt_version=version, compute_capability=capability)


def _engine_summary(bundle: Bundle, role: str, record: EngineRecord) -> Summary:
    flavour = FLAVOURS[record.flavour]
    machine = _machine_here(flavour)
    facts = {
        f"version of {flavour.name}, which is not installed": machine.tensorrt_version,
        "compute capability, because no GPU is found": machine.compute_capability,
    }
    return Summary(
        role=role,
        built=record,
        problems=list(misfits(record, bundle, role, flavour, machine)),
        not_checked=[name for name, fact in facts.items() if fact is None],
    )
