"""Loading of one model, or of target and draft as a pair that shares the processor."""

from collections.abc import Callable
from dataclasses import replace

from dsbd_runtime.bundle_files.bundle import WEIGHTS_FILE, Bundle
from dsbd_runtime.device.cuda_device import check_cuda_device, import_cuda_runtime
from dsbd_runtime.device.ort_engine import open_cuda_session
from dsbd_runtime.engine.causal_lm import CausalLM, language_model
from dsbd_runtime.engine.providers import PLUGIN, Placement, check_tried, parse_placement
from dsbd_runtime.engine.session import EngineOptions, Session
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.errors import InputError, ProviderError
from dsbd_runtime.ort.ort_module import import_ort_for
from dsbd_runtime.ort.ort_session import open_host_session
from dsbd_runtime.phases import phase, shown_bytes
from dsbd_runtime.plugin.plugin_engine import open_plugin_session
from dsbd_runtime.plugin.plugin_module import plugin_device
from dsbd_runtime.tensorrt.trt_engine import open_trt_session
from dsbd_runtime.tensorrt.trt_module import FLAVOURS, import_trt

SMALL_DRAFT_BYTES = 32 * 2**20


BACKENDS: dict[str, Callable[[EngineOptions], Session]] = {
    "onnxruntime-host": open_host_session,
    "onnxruntime-device": open_cuda_session,
    PLUGIN: open_plugin_session,
    "tensorrt": open_trt_session,
}
"""Functions that open a session, by the ``backend`` of a provider."""


def load_causal_lm(
    bundle: Bundle,
    role: str,
    *,
    provider: str = "cpu",
    settings: EngineSettings = EngineSettings(),
) -> CausalLM:
    """Open the "target" or the "draft" of a bundle; use it as a context manager.

    Args:
        bundle: from ``open_bundle``.
        role: "target" or "draft".
        provider: name in the table of ``providers``; "cuda:1" is the second GPU.
        settings: settings of the engine; settings that the provider does not have are refused.

    Raises:
        BundleError: the engine is damaged or contradicts the manifest.
        ProviderError: the provider or its package is not on this machine.
        InputError: a setting that the provider does not have.
    """
    placement = parse_placement(provider)
    settings.check_used([placement.provider])
    return open_causal_lm(
        EngineOptions(bundle=bundle, role=role, placement=placement, settings=settings)
    )


def load_pair(
    bundle: Bundle,
    *,
    provider: str = "cpu",
    draft_provider: str | None = None,
    settings: EngineSettings = EngineSettings(),
) -> tuple[CausalLM, CausalLM]:
    """Open target and draft so that their threads do not compete for cores.

    A small draft gets one thread and no pool, because its calls end before a second thread has
    begun. Idle threads of either model sleep soon (``EngineSettings.spin_us``), because the other
    model needs their cores. Each setting applies to the engines whose provider has it. Raises the
    errors of ``load_causal_lm``, and InputError for a bundle without a draft.
    """
    bundle.entry("draft")  # refuse a bundle without one before anything is opened
    target_place = parse_placement(provider)
    draft_place = parse_placement(draft_provider or provider)
    providers = [target_place.provider, draft_place.provider]
    settings.check_used(providers)
    if bundle.entry("draft").is_feature_draft and target_place != draft_place:
        raise InputError(
            f"draft_provider is {draft_provider!r} and provider {provider!r}, but the draft of "
            f"{bundle.path} reads features of the target, which stay where they are; leave "
            "draft_provider out"
        )
    shares_cores = not any(row.has_device_caches for row in providers)
    weights = bundle.manifest.files.get(f"draft/{WEIGHTS_FILE}")
    is_small = weights is None or weights.size <= SMALL_DRAFT_BYTES
    draft_settings = replace(settings, num_threads=1) if shares_cores and is_small else settings
    request = EngineOptions(bundle=bundle, role="target", placement=target_place, settings=settings)
    session = _open_session(request)
    target = language_model(session, bundle.entry("target"))
    try:
        return target, open_causal_lm(
            replace(
                request,
                role="draft",
                placement=draft_place,
                settings=draft_settings,
                target=session,
            )
        )
    except BaseException:
        target.close()
        raise


def open_causal_lm(request: EngineOptions) -> CausalLM:
    """Open one engine; see ``load_causal_lm``, which also checks the settings."""
    return language_model(_open_session(request), request.bundle.entry(request.role))


def _open_session(request: EngineOptions) -> Session:
    provider, bundle, role = request.placement.provider, request.bundle, request.role
    if provider.ort_name is None and bundle.entry(role).features:
        raise ProviderError(
            f"the {role} of {bundle.path} has features, which provider {provider.name!r} does not "
            "run; use 'cpu' or 'cuda', or export a pair without"
        )
    size = shown_bytes(bundle.num_bytes(role) + bundle.num_encoder_bytes(role))
    with phase(f"opening the {role} of {bundle.path}: reading and packing {size}"):
        return BACKENDS[provider.backend](request)


def check_available(placement: Placement) -> None:
    """Raise ProviderError if a package or device is missing; the message says how to install it."""
    provider = placement.provider
    check_tried(provider)
    if provider.ort_name is not None:
        ort = import_ort_for(provider)
    else:
        import_trt(FLAVOURS[provider.name])
    if provider.is_plugin:
        plugin_device(ort, provider, placement.device_id)
    elif provider.has_device_caches:
        check_cuda_device(import_cuda_runtime(provider.install_line), placement.device_id)
