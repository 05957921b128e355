"""What a bundle holds and which providers of this machine can run it, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsbd_ort.commands.engine_summary import (
    EngineSummary,
    engine_problems,
    summarize_engines,
)
from dsbd_runtime.bundle import MODEL_FILE, ROLES, Bundle, KVGeometry
from dsbd_runtime.errors import ProviderError
from dsbd_runtime.loading import check_available
from dsbd_runtime.providers import PROVIDERS, Placement, Provider, check_dtype

_NUM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_CACHES_A_LAYER = 2  # keys and values


@dataclass(frozen=True, kw_only=True)
class ParitySummary:
    """The export's gate: the measure's name, its value and the limit it had to meet."""

    measure: str
    value: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """One engine of the bundle.

    Attributes:
        family: ``model_type`` of the checkpoint.
        dtype: type of what is not quantized.
        logits: "full" or "topk:K".
        weight_bytes: the engine's files, prune graph aside.
        kv_bytes_per_token: of keys and values of all layers.
        kv_bytes_full_context: the same times the context length.
        sliding_window: positions that a sliding-window layer sees, None without such layers.
    """

    family: str
    dtype: str
    quantization: str
    logits: str
    weight_bytes: int
    vocab_size: int
    context_length: int
    kv: KVGeometry
    kv_bytes_per_token: int
    kv_bytes_full_context: int
    masks: list[str]
    sliding_window: int | None
    parity: ParitySummary


@dataclass(frozen=True, kw_only=True)
class ProviderSummary:
    """Whether an execution provider can run the bundle here, and what to mend if not."""

    name: str
    can_run: bool
    problems: list[str]


@dataclass(frozen=True, kw_only=True)
class BundleSummary:
    """Everything that dsbd-inspect tells; ``--json`` prints these fields, in this order.

    Attributes:
        bundle: the folder.
        verified: whether the hash of every file was checked, besides sizes.
        versions: of the tools that made it.
        context_length: the smaller of both models', which is what a request may use.
        kv_bytes_per_token, kv_bytes_full_context: of both models together.
        total_bytes: of all files.
        files: size in bytes by name.
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
    draft: ModelSummary
    total_bytes: int
    files: dict[str, int]
    engines: list[EngineSummary]
    providers: list[ProviderSummary]


def summarize_bundle(bundle: Bundle, *, verified: bool) -> BundleSummary:
    """Return the summary of an opened bundle; ONNX Runtime is asked only for its providers."""
    manifest = bundle.manifest
    files = {name: entry.size for name, entry in manifest.files.items()}
    target, draft = (_model_summary(bundle, role) for role in ROLES)
    context_length = min(target.context_length, draft.context_length)
    kv_bytes_per_token = target.kv_bytes_per_token + draft.kv_bytes_per_token
    return BundleSummary(
        bundle=str(bundle.path),
        schema_version=manifest.schema_version,
        verified=verified,
        versions=manifest.versions,
        vocab_size=target.vocab_size,
        context_length=context_length,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_bytes_full_context=kv_bytes_per_token * context_length,
        target=target,
        draft=draft,
        total_bytes=sum(files.values()),
        files=files,
        engines=summarize_engines(bundle),
        providers=[_provider_summary(provider, bundle) for provider in PROVIDERS],
    )


def _model_summary(bundle: Bundle, role: str) -> ModelSummary:
    entry = bundle.entry(role)
    kv, parity = entry.kv, entry.parity
    numbers = _CACHES_A_LAYER * kv.num_layers * kv.num_heads * kv.head_dim
    kv_bytes_per_token = numbers * _NUM_BYTES[kv.dtype]
    return ModelSummary(
        family=entry.family,
        dtype=entry.dtype,
        quantization=entry.quantization,
        logits=entry.logits,
        weight_bytes=sum(
            file.size
            for name, file in bundle.manifest.files.items()
            if name.startswith(f"{role}/{MODEL_FILE}")
        ),
        vocab_size=entry.vocab_size,
        context_length=entry.context_length,
        kv=kv,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_bytes_full_context=kv_bytes_per_token * entry.context_length,
        masks=entry.masks,
        sliding_window=entry.sliding_window,
        parity=ParitySummary(
            measure=parity.measure, value=getattr(parity, parity.measure), limit=parity.limit
        ),
    )


def _provider_summary(provider: Provider, bundle: Bundle) -> ProviderSummary:
    problems = list(dict.fromkeys(_problems(provider, bundle)))
    return ProviderSummary(name=provider.name, can_run=not problems, problems=problems)


def _problems(provider: Provider, bundle: Bundle) -> Iterator[str]:
    """Yield every reason why the provider cannot run the bundle here, each with its mend."""
    try:
        check_available(Placement(provider, 0))
    except ProviderError as error:
        yield str(error)
    for role in ROLES:
        try:
            check_dtype(provider, bundle.entry(role), bundle.model_path(role))
        except ProviderError as error:
            yield str(error)
    if provider.backend == "tensorrt":
        yield from engine_problems(bundle, provider)
