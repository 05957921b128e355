"""Execution providers: the capabilities of each in one table, and the placement of an engine."""

import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsbd_errors import install_hint
from dsbd_runtime.bundle_files.manifest import (
    FORMS,
    PORTABLE,
    QUANTIZED_FORMS,
    WEBGPU,
    ModelEntry,
    quantize_option,
)
from dsbd_runtime.errors import ProviderError
from dsbd_runtime.parts.attention.cache_entries import recent
from dsbd_runtime.typed_json import in_short


@dataclass(frozen=True, kw_only=True)
class Provider:
    """One execution provider.

    ort_name: its name in ONNX Runtime; None: it does not use ONNX Runtime.
    extra: the extra of dsbd-ort that installs it.
    no_wheels_for: processors for which the package index has no wheel of its package.
    backend: the kind of session, a key of ``loading.BACKENDS``.
    options: options of ONNX Runtime's plug-in, for every engine.
    is_tried: whether this project has ever run it; if not, it is refused.
    dtypes: types of bundles that it runs, the usual one first.
    quantizations: kinds of quantized bundles that it runs, a subset of ``QUANTIZED_FORMS``.
    forms: forms of graphs that it runs, the usual one first.
    has_device_caches: whether the caches are in the memory of a GPU.
    uses_cuda_graphs: whether calls of a size are captured and replayed by default, with CUDA graphs
        or the graphs of a plug-in.
    """

    name: str
    module: str
    ort_name: str | None
    extra: str
    no_wheels_for: tuple[str, ...] = ()
    backend: str
    dtypes: tuple[str, ...]
    quantizations: tuple[str, ...]
    has_device_caches: bool
    uses_cuda_graphs: bool
    forms: tuple[str, ...] = FORMS
    options: tuple[tuple[str, str], ...] = ()
    is_tried: bool = True

    @property
    def is_plugin(self) -> bool:
        """Whether it is a plug-in of ONNX Runtime, which is in the package ``module``."""
        return self.backend == PLUGIN

    @property
    def install_line(self) -> str:
        return self.install_line_on(platform.machine())

    def install_line_on(self, machine: str) -> str:
        if machine in self.no_wheels_for:
            return (
                f"the package index has no {self.module} with {self.name!r} for {machine} (Jetson, "
                "Grace): build it from source, or use provider 'cpu'"
            )
        return install_hint(self.extra)


PLUGIN = "onnxruntime-plugin"
_WEBGPU = Provider(
    name="webgpu",
    module="onnxruntime_ep_webgpu",
    ort_name="WebGpuExecutionProvider",
    extra="webgpu",
    backend=PLUGIN,
    dtypes=("fp32", "fp16"),
    quantizations=tuple(form for form in QUANTIZED_FORMS if form != "int8-dynamic"),
    has_device_caches=True,
    uses_cuda_graphs=True,
    forms=(WEBGPU,),
    options=(("enableInt64", "1"),),
)
_UNTRIED: dict[str, Any] = {"extra": "", "options": (), "is_tried": False}
_TENSORRT = Provider(
    name="tensorrt",
    module="tensorrt",
    ort_name=None,
    extra="tensorrt",
    backend="tensorrt",
    dtypes=("fp16", "bf16", "fp32"),
    quantizations=("none",),
    has_device_caches=True,
    uses_cuda_graphs=False,
    forms=(PORTABLE,),
)
PROVIDERS = (
    Provider(
        name="cpu",
        module="onnxruntime",
        ort_name="CPUExecutionProvider",
        extra="cpu",
        backend="onnxruntime-host",
        dtypes=("fp32", "fp16"),
        quantizations=QUANTIZED_FORMS,
        has_device_caches=False,
        uses_cuda_graphs=False,
    ),
    Provider(
        name="cuda",
        module="onnxruntime",
        ort_name="CUDAExecutionProvider",
        extra="gpu",
        no_wheels_for=("aarch64", "arm64"),
        backend="onnxruntime-device",
        dtypes=("fp16", "bf16", "fp32"),
        quantizations=tuple(form for form in QUANTIZED_FORMS if form != "int8-dynamic"),
        has_device_caches=True,
        uses_cuda_graphs=True,
    ),
    _WEBGPU,
    _TENSORRT,
    replace(_TENSORRT, name="tensorrt-rtx", module="tensorrt_rtx", extra="tensorrt-rtx"),
    *(
        replace(
            _WEBGPU, name=name, module=module, ort_name=f"{ort_name}ExecutionProvider", **_UNTRIED
        )
        for name, module, ort_name in (
            ("nv-tensorrt-rtx", "onnxruntime_ep_nv_tensorrt_rtx", "NvTensorRTRTX"),
            ("openvino", "onnxruntime_ep_openvino", "OpenVINO"),
            ("qnn", "onnxruntime_qnn", "QNN"),
            ("mlx", "onnxruntime_ep_mlx", "MLX"),
        )
    ),
)


def find_provider(name: str) -> Provider:
    """Return the row of ``name``; raise ProviderError for an unknown name."""
    for provider in PROVIDERS:
        if provider.name == name:
            return provider
    names = ", ".join(provider.name for provider in PROVIDERS if provider.is_tried)
    raise ProviderError(
        f"no execution provider {in_short(name)} in this version; choose one of: {names}"
    )


def check_tried(provider: Provider) -> None:
    """Raise ProviderError for a plug-in that this project has never run."""
    if not provider.is_tried:
        raise ProviderError(
            f"provider {provider.name!r}, the plug-in {provider.module}, is not tried with "
            "dsbd-ort; use 'webgpu', which runs on most GPUs, or 'cpu'"
        )


def check_runnable(provider: Provider, entry: ModelEntry, model_path: Path) -> None:
    """Raise ProviderError unless the provider runs an engine: types, caches, quantization."""
    if entry.encoder is not None and provider.has_device_caches:
        raise ProviderError(
            f"{model_path} is the engine of an encoder-decoder, which provider {provider.name!r} "
            "does not run; use 'cpu'"
        )
    if (form := entry.form or PORTABLE) not in provider.forms:
        raise ProviderError(
            f"{model_path} has the form {form}, provider {provider.name!r} runs "
            f"{', '.join(provider.forms)}; export with --form {provider.forms[0]}"
        )
    if entry.quantization not in provider.quantizations:
        options = list(dict.fromkeys(map(quantize_option, provider.quantizations)))
        raise ProviderError(
            f"{model_path} is quantized as {quantize_option(entry.quantization)}, for which "
            f"provider {provider.name!r} has no kernels; it runs {', '.join(options)}: export with "
            f"--quantize {options[-1]} --dtype {provider.dtypes[0]}"
        )
    if provider.has_device_caches and recent(entry.caches):
        raise ProviderError(
            f"{model_path} (family {entry.family}) has convolutions or recurrences, whose rows "
            f"provider {provider.name!r} cannot fold yet; use provider 'cpu'"
        )
    for dtype in (entry.dtype, *(cache.dtype for cache in entry.caches)):
        if dtype not in provider.dtypes:
            raise ProviderError(
                f"{model_path} is in {dtype}, provider {provider.name!r} runs "
                f"{', '.join(provider.dtypes)}; export with --dtype {provider.dtypes[0]}"
            )


@dataclass(frozen=True)
class Placement:
    """A provider and the number of its device; 0 if it has no devices."""

    provider: Provider
    device_id: int


def parse_placement(text: str) -> Placement:
    """Return the placement of "cpu", "cuda" (the first GPU) or "cuda:1", or raise ProviderError."""
    name, colon, number = text.partition(":")
    provider = find_provider(name)
    check_tried(provider)
    if not colon:
        return Placement(provider, 0)
    if not provider.has_device_caches:
        raise ProviderError(f"provider {text!r}: {name} has no numbered devices; write {name!r}")
    if not (number.isascii() and number.isdigit()):
        raise ProviderError(
            f"provider {text!r} names the device {number!r}, expected a number: '{name}:0'"
        )
    return Placement(provider, int(number))
