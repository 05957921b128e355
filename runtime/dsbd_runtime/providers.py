"""What each execution provider can do: one row a provider, and the checks against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from dsbd_runtime.errors import ProviderError
from dsbd_runtime.manifest import ModelEntry
from dsbd_runtime.onnxruntime_module import onnxruntime_module


@dataclass(frozen=True, kw_only=True)
class Provider:
    """One execution provider.

    Attributes:
        name: what users write.
        module: the Python module that brings it.
        ort_name: what ONNX Runtime calls it; None where ONNX Runtime is not used.
        extra: the extra of dsbd-ort whose package offers it.
        backend: which session opens it, a key of ``loading.BACKENDS``.
        dtypes: the types of bundles that it runs, the usual one first.
        has_static_capacity: whether an engine is built for one number of cache rows.
        has_device_caches: whether the caches lie in the memory of a GPU.
        has_cuda_graphs: whether a call can be captured once and replayed.
    """

    name: str
    module: str
    ort_name: str | None
    extra: str
    backend: str
    dtypes: tuple[str, ...]
    has_static_capacity: bool
    has_device_caches: bool
    has_cuda_graphs: bool

    @property
    def install_line(self) -> str:
        """The command that installs what offers it."""
        return f'pip install "dsbd-ort[{self.extra}]"'


PROVIDERS = (
    Provider(
        name="cpu",
        module="onnxruntime",
        ort_name="CPUExecutionProvider",
        extra="cpu",
        backend="onnxruntime-host",
        dtypes=("fp32", "fp16"),
        has_static_capacity=False,
        has_device_caches=False,
        has_cuda_graphs=False,
    ),
    Provider(
        name="cuda",
        module="onnxruntime",
        ort_name="CUDAExecutionProvider",
        extra="gpu",
        backend="onnxruntime-device",
        dtypes=("fp16", "bf16", "fp32"),
        has_static_capacity=False,
        has_device_caches=True,
        has_cuda_graphs=True,
    ),
    Provider(
        name="tensorrt",
        module="tensorrt",
        ort_name=None,
        extra="tensorrt",
        backend="tensorrt",
        dtypes=("fp16", "bf16", "fp32"),
        has_static_capacity=True,
        has_device_caches=True,
        has_cuda_graphs=False,
    ),
    Provider(
        name="tensorrt-rtx",
        module="tensorrt_rtx",
        ort_name=None,
        extra="tensorrt-rtx",
        backend="tensorrt",
        dtypes=("fp16", "bf16", "fp32"),
        has_static_capacity=True,
        has_device_caches=True,
        has_cuda_graphs=False,
    ),
)


def find_provider(name: str) -> Provider:
    """Return the row of ``name``; raise ProviderError where there is none."""
    for provider in PROVIDERS:
        if provider.name == name:
            return provider
    known = ", ".join(provider.name for provider in PROVIDERS)
    raise ProviderError(f"no execution provider {name!r} in this version; choose one of: {known}")


def import_onnxruntime(provider: Provider) -> ModuleType:
    """Return the module onnxruntime, which must offer ``provider``.

    A late import: reading a bundle's manifest needs no engine, and which package brings the module
    is the user's choice of extra.
    """
    try:
        ort = onnxruntime_module()
    except ImportError as error:
        raise ProviderError(
            f"provider {provider.name!r} needs ONNX Runtime, which cannot be imported ({error}); "
            f"{provider.install_line}"
        ) from error
    check_offered(provider, ort.get_available_providers(), "this onnxruntime package offers")
    return ort


def check_offered(provider: Provider, offered: Sequence[str], where: str) -> None:
    """Raise ProviderError unless ``offered``, names of ONNX Runtime, holds the provider.

    Asked before a session is made and of the session afterwards: ONNX Runtime itself falls back
    to the CPU with no more than a warning.
    """
    if provider.ort_name not in offered:
        raise ProviderError(
            f"provider {provider.name!r} needs {provider.ort_name}, {where} {list(offered)}; "
            "pip uninstall onnxruntime onnxruntime-gpu (both bring the module onnxruntime), then "
            f"{provider.install_line}"
        )


def check_dtype(provider: Provider, entry: ModelEntry, model_path: Path) -> None:
    """Raise ProviderError unless the provider runs the types of the engine and its caches."""
    for dtype in (entry.dtype, entry.kv.dtype):
        if dtype not in provider.dtypes:
            raise ProviderError(
                f"{model_path} is in {dtype}, provider {provider.name!r} runs "
                f"{', '.join(provider.dtypes)}; export with --dtype {provider.dtypes[0]}"
            )
