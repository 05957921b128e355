"""What each execution provider can do: one row a provider, and the checks against it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from dsbd_runtime.errors import ProviderError
from dsbd_runtime.manifest import ModelEntry


@dataclass(frozen=True, kw_only=True)
class Provider:
    """One execution provider.

    Attributes:
        name: what users write.
        ort_name: what ONNX Runtime calls it.
        extra: the extra of dsbd-ort whose package offers it.
        dtypes: the types of bundles that it runs.
    """

    name: str
    ort_name: str
    extra: str
    dtypes: tuple[str, ...]


PROVIDERS = (
    Provider(name="cpu", ort_name="CPUExecutionProvider", extra="cpu", dtypes=("fp32", "fp16")),
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

    The only import of onnxruntime, and a late one: reading a bundle's manifest needs no engine,
    and which package brings the module is the user's choice of extra.
    """
    try:
        ort = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise ProviderError(
            f"provider {provider.name!r} needs ONNX Runtime, which cannot be imported ({error}); "
            f"{_install_line(provider)}"
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
            f"{_install_line(provider)}"
        )


def check_dtype(provider: Provider, entry: ModelEntry, model_path: Path) -> None:
    """Raise ProviderError unless the provider runs the types of the engine and its caches."""
    for dtype in (entry.dtype, entry.kv.dtype):
        if dtype not in provider.dtypes:
            raise ProviderError(
                f"{model_path} is in {dtype}, provider {provider.name!r} runs "
                f"{', '.join(provider.dtypes)}; export with --dtype {provider.dtypes[0]}"
            )


def _install_line(provider: Provider) -> str:
    return f'pip install "dsbd-ort[{provider.extra}]"'
