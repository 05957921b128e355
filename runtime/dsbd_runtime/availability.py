"""Whether a provider can be used on this machine: its package, its driver, its device."""

from __future__ import annotations

from dsbd_runtime.cuda_device import check_cuda_device, import_cuda_runtime
from dsbd_runtime.placement import Placement
from dsbd_runtime.providers import import_onnxruntime
from dsbd_runtime.trt_module import FLAVOURS, import_trt


def check_here(placement: Placement) -> None:
    """Raise ProviderError naming what is missing first and what mends it."""
    provider = placement.provider
    if provider.ort_name is not None:
        import_onnxruntime(provider)
    else:
        import_trt(FLAVOURS[provider.name])
    if provider.has_device_caches:
        check_cuda_device(import_cuda_runtime(provider.install_line), placement.device_id)
