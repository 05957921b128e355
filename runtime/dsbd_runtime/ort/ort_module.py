"""ONNX Runtime: import without telemetry, check of its providers, options, opening of a graph."""

import importlib
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dsbd_runtime.bundle_files.manifest import ModelEntry
from dsbd_runtime.engine.providers import Provider
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.errors import BundleError, InputError, ProviderError
from dsbd_runtime.ort.huge_pages import huge_pages

TELEMETRY_SWITCH = "ORT_DISABLE_TELEMETRY"

LOG_ERRORS = 3
LOG_WARNINGS = 2
_MOST_THREADS = 1024
SPIN_US = 20
_MOST_SPIN_US = 10_000
_X86 = ("x86_64", "AMD64", "i386", "i686")
_VNNI = {"avx512_vnni", "avx_vnni"}


def import_ort() -> ModuleType:
    """Return the module onnxruntime; raise ImportError unless a package that contains it is there.

    From 1.29 on its wheels report every opened session to Microsoft, unless ``TELEMETRY_SWITCH`` is
    in the environment at the first use: it is set here unless the user has set it. (The thread
    that reports also outlives the main function of a host in C, and reads freed memory.)
    """
    os.environ.setdefault(TELEMETRY_SWITCH, "1")
    return importlib.import_module("onnxruntime")


def import_ort_for(provider: Provider) -> ModuleType:
    """Return the module onnxruntime; raise ProviderError unless it offers ``provider``.

    A late import: reading a manifest needs no engine, and the user chooses the package by an extra.
    """
    try:
        ort = import_ort()
    except ImportError as error:
        raise ProviderError(
            f"provider {provider.name!r} needs ONNX Runtime, which cannot be imported ({error}); "
            f"{provider.install_line}"
        ) from error
    check_offered(provider, ort.get_available_providers(), "this onnxruntime package offers")
    return ort


def check_offered(provider: Provider, offered: Sequence[str], where: str) -> None:
    """Raise ProviderError unless ``offered``, names of ONNX Runtime, holds the provider.

    Called before a session is opened and with the session's own providers afterwards: ONNX
    Runtime itself falls back to the CPU with only a warning.
    """
    if provider.ort_name not in offered:
        raise ProviderError(
            f"provider {provider.name!r} needs {provider.ort_name}, {where} {list(offered)}; "
            "pip uninstall onnxruntime onnxruntime-gpu (both bring the module onnxruntime), then "
            f"{provider.install_line}"
        )


def session_options(ort: ModuleType, entry: ModelEntry, settings: EngineSettings) -> Any:
    """Return the session options of an engine.

    Idle threads spin for ``spin_us`` (None: ``SPIN_US``), which bridges operators on one thread,
    then sleep. ONNX Runtime's default, milliseconds, gains little on a quiet machine; with other
    processes it occupies cores that calls need.
    """
    options = ort.SessionOptions()
    num_threads = settings.num_threads
    spin_us = SPIN_US if settings.spin_us is None else settings.spin_us
    if type(spin_us) is not int or not 0 <= spin_us <= _MOST_SPIN_US:
        raise InputError(
            f"spin_us is {spin_us!r}, expected a whole number of microseconds from 0 (idle threads "
            f"sleep at once) to {_MOST_SPIN_US}"
        )
    if spin_us:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(spin_us))
    else:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if num_threads is not None:
        if type(num_threads) is not int or not 1 <= num_threads <= _MOST_THREADS:
            raise InputError(
                f"num_threads is {num_threads!r}, expected a whole number from 1 to {_MOST_THREADS}"
            )
        options.intra_op_num_threads = num_threads
    if entry.quantization == "int8-dynamic":
        keep_int8_products_exact(options)
    return options


def without_packing(options: Any, entry: ModelEntry) -> Any:
    """Let an engine read weights directly from the file, which another engine has mapped too.

    Packed weights would be a second copy in memory for a few calls of many rows. Weights in blocks
    are packed in any case, because unpacked ones compute in another precision.
    """
    if entry.quantization in ("none", "int8-dynamic"):
        options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def releasing_options(ort: ModuleType) -> Any:
    """Return the options of a call that releases memory which it does not need itself.

    Otherwise ONNX Runtime keeps the memory for intermediate results of the largest call, such as
    attention over all caches.
    """
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


@dataclass(eq=False)
class OrtGraphs:
    """Opens the graphs of one engine on a provider in host memory; see ``HostGraphs``.

    ``OrtSession`` explains the fields.
    """

    provider: Provider
    entry: ModelEntry
    settings: EngineSettings
    log_severity: int = LOG_ERRORS
    adapt: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        self.ort = import_ort_for(self.provider)

    def options(self) -> Any:
        options = session_options(self.ort, self.entry, self.settings)
        options.log_severity_level = self.log_severity
        if self.adapt is not None:
            self.adapt(options)
        return options

    def open(self, path: Path) -> Any:
        return self.open_with(path, self.options())

    def open_with(self, path: Path, options: Any) -> Any:
        """Return the session on a graph with other options.

        BundleError: it cannot be loaded; ProviderError: it runs on another provider.
        """
        try:
            with huge_pages():
                engine = self.ort.InferenceSession(
                    str(path),
                    options,
                    providers=[self.provider.ort_name],
                    enable_fallback=False,  # which would print to stdout and try the same again
                )
        except Exception as error:  # its exceptions share no base but this one
            reason = " ".join(str(error).split())
            raise BundleError(
                f"ONNX Runtime cannot load {path} ({reason}); copy the bundle or export again"
            ) from error
        check_offered(self.provider, engine.get_providers(), f"the session of {path} runs on")
        return engine

    def open_again(self, path: Path) -> Any:
        return self.open_with(path, without_packing(self.options(), self.entry))

    def releasing_options(self) -> Any:
        return releasing_options(self.ort)


def keep_int8_products_exact(options: Any) -> None:
    """Set session options so that products of uint8 and int8 do not saturate.

    ONNX Runtime (1.31.1) applies them from ``ORT_ENABLE_EXTENDED`` on; at lower levels sums are
    silently wrong.
    """
    if saturates_int8_products():
        options.add_session_config_entry("session.x64quantprecision", "1")


def saturates_int8_products(
    machine: str = platform.machine(), cpu_info: Path = Path("/proc/cpuinfo")
) -> bool:
    """Return whether products of uint8 and int8 may saturate at 16 bits on this processor.

    x86 without the VNNI instructions adds pairs of products in int16, and onnxruntime's kernels for
    W8A8 give wrong sums there by default. If the instructions are unknown the result is True,
    because slower is better than wrong.
    """
    if machine not in _X86:
        return False
    try:
        text = cpu_info.read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return _VNNI.isdisjoint(flags.split())
