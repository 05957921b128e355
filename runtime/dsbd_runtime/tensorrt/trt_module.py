"""TensorRT and TensorRT for RTX: two packages with one interface, named ``trt`` in the code."""

import importlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dsbd_runtime.engine.providers import Provider, find_provider
from dsbd_runtime.errors import ProviderError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """One of the two packages.

    Attributes:
        name: the engine of an export, and the provider.
        oldest: first supported version.
        builds_for_others: whether it builds for other compute capabilities than this machine's.
        has_timing_cache: whether builds can reuse measured kernel times.
        compiles_kernels: whether kernels are compiled at the first calls, not at the build.
    """

    name: str
    oldest: tuple[int, ...]
    builds_for_others: bool
    has_timing_cache: bool
    compiles_kernels: bool

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
            compiles_kernels=False,
        ),
        Flavour(
            name="tensorrt-rtx",
            oldest=(1, 7),
            builds_for_others=True,
            has_timing_cache=False,
            compiles_kernels=True,
        ),
    )
}


def import_trt(
    flavour: Flavour, import_module: Callable[[str], ModuleType] = importlib.import_module
) -> ModuleType:
    """Return the module; raise ProviderError if it is missing, broken or too old."""
    provider = flavour.provider
    try:
        trt = import_module(provider.module)
    except (ImportError, OSError) as error:
        raise ProviderError(
            f"{flavour.name} needs the package {provider.module}, which cannot be imported "
            f"({error}); {provider.install_line}"
        ) from error
    if version_numbers(trt.__version__) < flavour.oldest:
        oldest = ".".join(map(str, flavour.oldest))
        raise ProviderError(
            f"{provider.module} {trt.__version__} is too old, at least {oldest} is needed; "
            f"{provider.install_line}"
        )
    return trt


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (10, 15, 1) of "10.15.1rc2"."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def trt_logger(trt: ModuleType, errors: list[str]) -> Any:
    """Return a logger for ``trt`` that appends errors to ``errors`` and logs the rest.

    Return values of TensorRT only say that a call failed; the reason goes to its logger.
    """
    levels = {
        trt.ILogger.INTERNAL_ERROR: logging.ERROR,
        trt.ILogger.ERROR: logging.ERROR,
        trt.ILogger.WARNING: logging.WARNING,
    }

    class Logger(trt.ILogger):  # type: ignore[name-defined, misc]  # its base must come from trt
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            level = levels.get(severity, logging.DEBUG)
            if level == logging.ERROR:
                errors.append(message)
            _log.log(min(level, logging.INFO), "%s", message)  # the caller raises errors

    return Logger()


def first_reason(errors: list[str]) -> str:
    """Return the first error in one line of bounded length."""
    text = " ".join(errors[0].split()) if errors else "it gave no reason"
    return text if len(text) <= 300 else f"{text[:297]}..."
