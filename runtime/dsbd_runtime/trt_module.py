"""TensorRT and TensorRT for RTX: two packages, one module surface, which the code calls ``trt``."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from dsbd_runtime.errors import ProviderError
from dsbd_runtime.providers import Provider, find_provider


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """One of the two packages.

    Attributes:
        name: what users write, as engine of an export and as provider.
        oldest: first version that will do.
        builds_for_others: whether it builds for a compute capability that this machine lacks.
        has_timing_cache: whether measured kernel times can be kept from build to build.
    """

    name: str
    oldest: tuple[int, ...]
    builds_for_others: bool
    has_timing_cache: bool

    @property
    def provider(self) -> Provider:
        """Its row of the table of providers."""
        return find_provider(self.name)


FLAVOURS = {
    flavour.name: flavour
    for flavour in (
        Flavour(
            name="tensorrt",
            oldest=(10, 15),  # cache updates in place, and Attention
            builds_for_others=False,
            has_timing_cache=True,
        ),
        Flavour(
            name="tensorrt-rtx",
            oldest=(1, 7),
            builds_for_others=True,
            has_timing_cache=False,
        ),
    )
}


def import_trt(
    flavour: Flavour, import_module: Callable[[str], ModuleType] = importlib.import_module
) -> ModuleType:
    """Return the module; raise ProviderError where it is missing, broken or too old."""
    provider = flavour.provider
    try:
        trt = import_module(provider.module)
    except (ImportError, OSError) as error:
        raise ProviderError(
            f"{flavour.name} needs the package {provider.module}, which cannot be imported "
            f"({error}); {provider.install_line}"
        ) from error
    if version_numbers(trt.__version__) < flavour.oldest:
        wanted = ".".join(map(str, flavour.oldest))
        raise ProviderError(
            f"{provider.module} {trt.__version__} is too old, at least {wanted} is needed; "
            f"{provider.install_line}"
        )
    return trt


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (10, 15, 1) of "10.15.1rc2"."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()
