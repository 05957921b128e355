"""Summary of a bundle as plain data: models, files, TensorRT engines, usable providers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsbd_ort.model_defaults import ModelDefaults
from dsbd_runtime.bundle_files.bundle import ENCODER_FILE, MODEL_FILE, Bundle, CacheEntry
from dsbd_runtime.bundle_files.draft_record import RECORD_FILE, DraftRecord, read_record
from dsbd_runtime.device.cuda_device import gpu_compute_capability, import_cuda_runtime
from dsbd_runtime.engine.providers import PROVIDERS, Placement, Provider, check_runnable
from dsbd_runtime.errors import BundleError, ProviderError
from dsbd_runtime.loading import check_available
from dsbd_runtime.parts.cache_entries import every_row
from dsbd_runtime.parts.encoder_entry import EncoderEntry
from dsbd_runtime.parts.features import FeatureEntry
from dsbd_runtime.parts.head import FULL
from dsbd_runtime.parts.kv_cache import row_bytes
from dsbd_runtime.parts.recent_rows import path_bytes
from dsbd_runtime.tensorrt.trt_module import FLAVOURS, Flavour, import_trt
from dsbd_runtime.tensorrt.trt_record import (
    EngineRecord,
    TrtMachine,
    find_record,
    fitting_record,
    misfits,
)


@dataclass(frozen=True, kw_only=True)
class ParitySummary:
    """The export's gate: the measure's name, its value and the limit it had to meet.

    accepted: the limit that a person gave for an engine that was refused, None for any other.
    """

    measure: str
    value: float
    limit: float
    accepted: float | None


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """One engine of the bundle.

    Attributes:
        family: ``model_type`` of the checkpoint.
        dtype: of the weights that are not quantized.
        logits: "full" or "topk:K".
        full_logits: whether all logits of a row can be read, whatever ``logits`` says.
        bit_exact: "by construction", "observed", False, or None where nothing is claimed.
        weight_bytes: the engine's files and those of its encoder, prune graph aside.
        kv_bytes_per_token: of keys and values of all layers.
        kv_bytes_full_context: the same times the context length.
        kv_bytes_per_path: of convolutions and recurrences, besides, of every request and of every
            beam that has parted from the others for long; 0 without such layers.
        sliding_window: positions that a sliding-window layer sees, None without such layers.
        features: hidden states that a target returns or a feature draft reads, None without.
        adapter: name of the one that was merged into the weights, None without.
        unread_inputs: what the checkpoint reads besides text and this engine does not.
        encoder: of an encoder-decoder, whose other numbers are the decoder's; None without.
        source_bytes_per_token: of keys and values of a source's token, 0 without an encoder.
    """

    family: str
    dtype: str
    quantization: str
    logits: str
    full_logits: bool
    bit_exact: str | bool | None
    weight_bytes: int
    vocab_size: int
    context_length: int
    num_layers: int
    caches: list[CacheEntry]
    kv_bytes_per_token: int
    kv_bytes_full_context: int
    kv_bytes_per_path: int
    masks: list[str]
    sliding_window: int | None
    features: FeatureEntry | None
    adapter: str | None
    unread_inputs: list[str]
    encoder: EncoderEntry | None
    source_bytes_per_token: int
    parity: ParitySummary

    @property
    def keeps_logits(self) -> bool:
        """Whether all logits can be read besides those that a forward returns."""
        return self.full_logits and self.logits != FULL


@dataclass(frozen=True, kw_only=True)
class EngineSummary:
    """The engines of one model.

    Attributes:
        role: "target" or "draft".
        built: content of its engine.json.
        problems: why they do not run on this machine.
        not_checked: facts that are unknown on this machine, so not compared.
    """

    role: str
    built: EngineRecord
    problems: list[str]
    not_checked: list[str]


@dataclass(frozen=True, kw_only=True)
class ProviderSummary:
    """Whether an execution provider can run the bundle here, and if not, the problems to fix."""

    name: str
    can_run: bool
    problems: list[str]


@dataclass(frozen=True, kw_only=True)
class BundleSummary:
    """Everything that dsbd-inspect prints; ``--json`` prints these fields, in this order.

    Attributes:
        bundle: the folder.
        verified: whether the hash of every file was checked, besides sizes.
        versions: of the tools that made it.
        context_length: the smaller of both models', which is what a request may use.
        kv_bytes_per_token, kv_bytes_full_context: of both models together.
        draft: None in a bundle without one.
        generation_config: what a request that leaves these options out gets, of the strategies that
            read them; see ModelDefaults.
        not_built: its further options, which are not supported and have no effect.
        total_bytes: of all files.
        files: size in bytes by name.
        draft_record: what dsbd-distill measured of the draft, None unless it made it.
        engines: of the models with TensorRT engines.
    """

    bundle: str
    schema_version: int
    verified: bool
    versions: dict[str, str]
    vocab_size: int
    context_length: int
    kv_bytes_per_token: int
    kv_bytes_full_context: int
    target: ModelSummary
    draft: ModelSummary | None
    generation_config: dict[str, Any]
    not_built: dict[str, Any]
    total_bytes: int
    files: dict[str, int]
    draft_record: DraftRecord | None
    engines: list[EngineSummary]
    providers: list[ProviderSummary]


def summarize_bundle(bundle: Bundle, *, verified: bool) -> BundleSummary:
    """Return the summary of an opened bundle; ONNX Runtime is used only to list its providers."""
    manifest = bundle.manifest
    files = {name: entry.size for name, entry in manifest.files.items()}
    models = {role: _model_summary(bundle, role) for role in bundle.roles}
    context_length = bundle.context_length
    defaults = ModelDefaults.from_bundle(bundle)
    kv_bytes_per_token = sum(model.kv_bytes_per_token for model in models.values())
    return BundleSummary(
        bundle=str(bundle.path),
        schema_version=manifest.schema_version,
        verified=verified,
        versions=manifest.versions,
        vocab_size=manifest.target.vocab_size,
        context_length=context_length,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_bytes_full_context=kv_bytes_per_token * context_length,
        target=models["target"],
        draft=models.get("draft"),
        generation_config=defaults.options,
        not_built=defaults.not_built,
        total_bytes=sum(files.values()),
        files=files,
        draft_record=_draft_record(bundle),
        engines=summarize_engines(bundle),
        providers=[_provider_summary(provider, bundle) for provider in PROVIDERS],
    )


def _draft_record(bundle: Bundle) -> DraftRecord | None:
    name = f"draft/{RECORD_FILE}"
    return read_record(bundle.path / name) if name in bundle.manifest.files else None


def _model_summary(bundle: Bundle, role: str) -> ModelSummary:
    entry = bundle.entry(role)
    parity = entry.parity
    kv_bytes_per_token = row_bytes(every_row(entry.caches))
    return ModelSummary(
        family=entry.family,
        dtype=entry.dtype,
        quantization=entry.quantization,
        logits=entry.logits,
        full_logits=entry.full_logits,
        bit_exact=entry.bit_exact,
        weight_bytes=sum(
            file.size
            for name, file in bundle.manifest.files.items()
            if name.startswith((f"{role}/{MODEL_FILE}", f"{role}/{ENCODER_FILE}"))
        ),
        vocab_size=entry.vocab_size,
        context_length=entry.context_length,
        num_layers=entry.num_layers,
        caches=entry.caches,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_bytes_full_context=kv_bytes_per_token * entry.context_length,
        kv_bytes_per_path=path_bytes(entry.caches),
        masks=entry.masks,
        sliding_window=entry.sliding_window,
        features=entry.features,
        adapter=entry.adapter,
        unread_inputs=entry.unread_inputs or [],
        encoder=entry.encoder,
        source_bytes_per_token=row_bytes(entry.encoder.cross) if entry.encoder else 0,
        parity=ParitySummary(
            measure=parity.measure,
            value=getattr(parity, parity.measure),
            limit=parity.limit,
            accepted=parity.accepted,
        ),
    )


def _provider_summary(provider: Provider, bundle: Bundle) -> ProviderSummary:
    problems = list(dict.fromkeys(_problems(provider, bundle)))
    return ProviderSummary(name=provider.name, can_run=not problems, problems=problems)


def _problems(provider: Provider, bundle: Bundle) -> Iterator[str]:
    """Yield every reason why the provider cannot run the bundle here, each with its fix."""
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
        yield from engine_problems(bundle, provider)


def summarize_engines(bundle: Bundle) -> list[EngineSummary]:
    """Return a summary for each model with TensorRT engines."""
    records = ((role, find_record(bundle, role)) for role in bundle.roles)
    return [_engine_summary(bundle, role, record) for role, record in records if record is not None]


def engine_problems(bundle: Bundle, provider: Provider) -> Iterator[str]:
    """Yield for each model why it has no engine for a TensorRT provider here, with the fix."""
    flavour = FLAVOURS[provider.name]
    machine = _machine_here(flavour)
    for role in bundle.roles:
        try:
            fitting_record(bundle, role, flavour, machine)
        except BundleError as error:
            yield str(error)


def _machine_here(flavour: Flavour) -> TrtMachine:
    """Return the TensorRT version and first GPU of this machine, as far as they are known."""
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


def _engine_summary(bundle: Bundle, role: str, record: EngineRecord) -> EngineSummary:
    flavour = FLAVOURS[record.flavour]
    machine = _machine_here(flavour)
    facts = {
        f"version of {flavour.name}, which is not installed": machine.tensorrt_version,
        "compute capability, because no GPU is found": machine.compute_capability,
    }
    return EngineSummary(
        role=role,
        built=record,
        problems=list(misfits(record, bundle, role, flavour, machine)),
        not_checked=[name for name, fact in facts.items() if fact is None],
    )
