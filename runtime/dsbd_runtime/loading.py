"""Loading of one model, or of target and draft as a pair that shares the processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from dsbd_runtime.bundle_files.bundle import WEIGHTS_FILE, Bundle
from dsbd_runtime.device.cuda_device import check_cuda_device, import_cuda_runtime
from dsbd_runtime.device.ort_engine import open_cuda_session
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.engine.graph import GATHER
from dsbd_runtime.engine.providers import Placement, Provider, check_reads_sources, parse_placement
from dsbd_runtime.engine.session import EngineOptions, Session
from dsbd_runtime.errors import InputError, ProviderError
from dsbd_runtime.ort.ort_module import import_ort_for
from dsbd_runtime.ort.ort_session import open_host_session
from dsbd_runtime.tensorrt.trt_engine import open_trt_session
from dsbd_runtime.tensorrt.trt_module import FLAVOURS, import_trt

SMALL_DRAFT_BYTES = 32 * 2**20


BACKENDS: dict[str, Callable[[EngineOptions], Session]] = {
    "onnxruntime-host": open_host_session,
    "onnxruntime-device": open_cuda_session,
    "tensorrt": open_trt_session,
}
"""Functions that open a session, by the ``backend`` of a provider."""


def load_causal_lm(
    bundle: Bundle,
    role: str,
    *,
    provider: str = "cpu",
    num_threads: int | None = None,
    spin_us: int | None = None,
    engine_cache: Path | None = None,
    cuda_graphs: bool | None = None,
    unfused_attention: bool = False,
) -> CausalLM:
    """Open the "target" or the "draft" of a bundle; use it as a context manager.

    Args:
        bundle: from ``open_bundle``.
        role: "target" or "draft".
        provider: where it runs, a name of the table in ``providers``; "cuda:1" is the second GPU.
        num_threads: threads of one call; None leaves the choice to ONNX Runtime.
        spin_us: microseconds for which an idle thread of the engine waits busily before it sleeps;
            None is ``ort_module.SPIN_US``.
        engine_cache: folder of prepared engines, see ``prepared_engine``; None opens the bundle's.
        cuda_graphs: capture a CUDA graph of every size of call that returns, and replay it; None:
            where that is the provider's default.
        unfused_attention: on "cuda", attention of two products and a softmax: no copy of keys and
            values for every query head, but scores in memory.

    Raises:
        BundleError: the engine is damaged or contradicts the manifest.
        ProviderError: the provider or its package is not on this machine.
        InputError: a setting that the provider does not have.
    """
    request = EngineOptions(
        bundle=bundle,
        role=role,
        placement=parse_placement(provider),
        num_threads=num_threads,
        spin_us=spin_us,
        engine_cache=engine_cache,
        cuda_graphs=cuda_graphs,
        unfused_attention=unfused_attention,
    )
    cpu_settings = {"num_threads": num_threads, "spin_us": spin_us, "engine_cache": engine_cache}
    _check_used(cpu_settings, cuda_graphs, unfused_attention, [request.placement.provider])
    return open_causal_lm(request)


def load_pair(
    bundle: Bundle,
    *,
    provider: str = "cpu",
    draft_provider: str | None = None,
    num_threads: int | None = None,
    spin_us: int | None = None,
    engine_cache: Path | None = None,
    cuda_graphs: bool | None = None,
    unfused_attention: bool = False,
) -> tuple[CausalLM, CausalLM]:
    """Open target and draft so that their threads do not compete for cores.

    A small draft, whose calls are over before a second thread has begun, gets one thread and no
    pool. The idle threads of either model sleep soon (``spin_us``): while they wait busily they
    take the cores that the other one needs.

    Args:
        bundle: from ``open_bundle``.
        provider: where the target runs, see ``load_causal_lm``.
        draft_provider: where the draft runs; None means the target's provider.
        num_threads: of the engines on the CPU.
        spin_us: of the engines on the CPU, see ``load_causal_lm``.
        engine_cache: of the engines on the CPU.
        cuda_graphs: see ``load_causal_lm``; for engines whose provider has them.
        unfused_attention: likewise.

    Raises the errors of ``load_causal_lm``, and InputError for a bundle without a draft.
    """
    bundle.entry("draft")  # refuse a bundle without one before anything is opened
    target_place = parse_placement(provider)
    draft_place = parse_placement(draft_provider or provider)
    providers = [target_place.provider, draft_place.provider]
    cpu_settings = {"num_threads": num_threads, "spin_us": spin_us, "engine_cache": engine_cache}
    _check_used(cpu_settings, cuda_graphs, unfused_attention, providers)
    if bundle.entry("draft").is_feature_draft and target_place != draft_place:
        raise InputError(
            f"draft_provider is {draft_provider!r} and provider {provider!r}, but the draft of "
            f"{bundle.path} reads features of the target, which stay where they are; leave "
            "draft_provider out"
        )
    shares_cores = not any(row.has_device_caches for row in providers)
    is_small = _has_small_draft(bundle)
    target_request, draft_request = (
        EngineOptions(
            bundle=bundle,
            role=role,
            placement=place,
            num_threads=threads,
            spin_us=spin_us,
            engine_cache=engine_cache,
            cuda_graphs=cuda_graphs,
            unfused_attention=unfused_attention,
        )
        for role, place, threads in (
            ("target", target_place, num_threads),
            ("draft", draft_place, 1 if shares_cores and is_small else num_threads),
        )
    )
    session = _open_session(target_request)
    target = CausalLM(session, bundle.entry("target"))
    try:
        return target, open_causal_lm(replace(draft_request, target=session))
    except BaseException:
        target.close()
        raise


def open_causal_lm(request: EngineOptions) -> CausalLM:
    """Open one engine; see ``load_causal_lm``, which checks the settings, for the errors."""
    return CausalLM(_open_session(request), request.bundle.entry(request.role))


def _open_session(request: EngineOptions) -> Session:
    provider = request.placement.provider
    if provider.ort_name is None and request.bundle.entry(request.role).features is not None:
        raise ProviderError(
            f"the {request.role} of {request.bundle.path} has features, which provider "
            f"{provider.name!r} does not run; use 'cpu' or 'cuda', or export a pair without"
        )
    if provider.ort_name is None and request.bundle.entry(request.role).logits == GATHER:
        raise ProviderError(
            f"the {request.role} of {request.bundle.path} has a gather head, which provider "
            f"{provider.name!r} does not run; use 'cpu' or 'cuda', or export with --logits topk:K"
        )
    bundle, role = request.bundle, request.role
    check_reads_sources(provider, bundle.entry(role), bundle.model_path(role))
    return BACKENDS[request.placement.provider.backend](request)


def _has_small_draft(bundle: Bundle) -> bool:
    weights = bundle.manifest.files.get(f"draft/{WEIGHTS_FILE}")
    return weights is None or weights.size <= SMALL_DRAFT_BYTES


def _check_used(
    cpu_settings: Mapping[str, object],
    cuda_graphs: bool | None,
    unfused_attention: bool,
    providers: list[Provider],
) -> None:
    """Raise InputError for a setting that none of the providers has."""
    names = " and ".join(dict.fromkeys(repr(row.name) for row in providers))
    for name, value in cpu_settings.items():
        if value is not None and all(row.has_device_caches for row in providers):
            raise InputError(f"{name} is {value}, but provider {names} runs on a GPU; leave it out")
    if cuda_graphs and not any(row.has_cuda_graphs for row in providers):
        raise InputError(
            f"cuda_graphs is set, but provider {names} has none; use a GPU's, such as 'cuda', or "
            "leave it out"
        )
    if unfused_attention and not any(row.backend == "onnxruntime-device" for row in providers):
        raise InputError(
            f"unfused_attention is set, but provider {names} has no such choice; use 'cuda', or "
            "leave it out"
        )


def check_available(placement: Placement) -> None:
    """Raise ProviderError naming the first thing that is missing here and how to install it."""
    provider = placement.provider
    if provider.ort_name is not None:
        import_ort_for(provider)
    else:
        import_trt(FLAVOURS[provider.name])
    if provider.has_device_caches:
        check_cuda_device(import_cuda_runtime(provider.install_line), placement.device_id)
