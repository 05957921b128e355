"""ONNX Runtime: import without telemetry, check of its providers, options, opening of a graph."""

import contextlib
import ctypes
import importlib
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dsbd_runtime.bundle_files.manifest import ModelEntry
from dsbd_runtime.engine.providers import Provider
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.errors import BundleError, InputError, ProviderError
from dsbd_runtime.parts.host_binder import releasing_options

TELEMETRY_SWITCH = "ORT_DISABLE_TELEMETRY"

LOG_ERRORS = 3
LOG_WARNINGS = 2
_MOST_THREADS = 1024
SPIN_US = 20
_MOST_SPIN_US = 10_000
_X86 = ("x86_64", "AMD64", "i386", "i686")
_VNNI = {"avx512_vnni", "avx_vnni"}


def import_ort() -> ModuleType:
    """Return the module onnxruntime; raise ImportError if no installed package contains it.

    From 1.29 on its wheels report every opened session to Microsoft, unless ``TELEMETRY_SWITCH`` is
    in the environment at the first use: it is set here unless the user has set it. (The thread
    that reports also outlives the main function of a host in C, and reads freed memory.)
    """
    os.environ.setdefault(TELEMETRY_SWITCH, "1")
    return importlib.import_module("onnxruntime")


def import_ort_for(provider: Provider) -> ModuleType:
    """Return the module onnxruntime; raise ProviderError unless it offers ``provider``."""
    try:
        ort = import_ort()
    except ImportError as error:
        raise ProviderError(
            f"provider {provider.name!r} needs ONNX Runtime, which cannot be imported ({error}); "
            f"{provider.install_line}"
        ) from error
    if not provider.is_plugin:  # a plug-in is offered once it is registered
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


@dataclass(eq=False)
class OrtGraphs:
    """Opens the graphs of one engine in host memory; see ``HostGraphs``, ``OrtSession``."""

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
        """Return the session; BundleError: cannot be loaded; ProviderError: another provider."""
        try:
            with huge_pages():
                engine = self.ort.InferenceSession(
                    str(path),
                    options,
                    providers=[self.provider.ort_name],
                    enable_fallback=False,  # which would print to stdout and try the same again
                )
        except Exception as error:  # ONNX Runtime's exceptions have no other common base
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

    ONNX Runtime (1.31.1) applies them from ``ORT_ENABLE_EXTENDED`` on; below, sums are wrong.
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


HUGE_PAGE = 2 << 20
POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MAPS = Path("/proc/self/maps")
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_SMALLEST = 4 << 20  # smaller ranges fit the TLB
_AT_ONCE = 4 << 20  # bytes that one call gathers, in 5 to 10 ms
_PAUSE = 10.0  # a pause takes this many times as long as the call before it

Range = tuple[int, int]
"""First address, and the address after the last."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def huge_pages() -> Iterator[None]:
    """Request huge pages for the memory that the process allocates within the block.

    An engine reads all of its weights in every call. With pages of 4 KiB their translations do not
    fit the TLB, so that calls also wait for page tables (twice as long in a virtual machine), and
    evict the translations of other code. Linux gathers memory into pages of 2 MiB if a process
    requests it. ONNX Runtime allocates by malloc, which does not.

    From Linux 6.1 on the memory is gathered after the block, in a thread; earlier versions gather
    over time. The thread pauses most of the time: memory that is being gathered delays calls and
    the opening of other engines (a pair of 2.4 GB took three times as long). Nothing is done on
    other systems, or if the administrator has set ``never``. If the kernel refuses, this costs
    only speed; it is logged at level DEBUG.
    """
    if not are_offered():
        yield
        return
    before = set(private_ranges(MAPS.read_text()))
    yield
    grown = [each for each in private_ranges(MAPS.read_text()) if each not in before]
    gathering = threading.Thread(
        target=_gather, args=(list(inner_pages(grown)),), name="dsbd-huge-pages", daemon=True
    )
    gathering.start()


def are_offered(platform: str = sys.platform, policy: Path = POLICY) -> bool:
    """Return whether this system gathers memory on request."""
    if platform != "linux":
        return False
    try:
        return "[never]" not in policy.read_text()
    except OSError:  # a kernel without them
        return False


def private_ranges(maps: str) -> Iterator[Range]:
    """Yield a process's writeable memory without mapped files.

    maps: the text of /proc/PID/maps.
    """
    for line in maps.splitlines():
        addresses, mode, _, _, inode, *name = line.split(maxsplit=5)
        if mode == "rw-p" and inode == "0" and (not name or name[0] == "[heap]"):
            begin, end = addresses.split("-")
            yield int(begin, 16), int(end, 16)


def inner_pages(ranges: Iterable[Range]) -> Iterator[Range]:
    """Yield the whole huge pages inside the large ranges."""
    for begin, end in ranges:
        first, stop = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if end - begin >= _SMALLEST and first < stop:
            yield first, stop


def _gather(ranges: Iterable[Range]) -> None:
    """Gather memory; the kernel refuses ranges that are gone or cannot be gathered."""
    libc = ctypes.CDLL(None, use_errno=True)
    for begin, end in ranges:
        for at in range(begin, end, _AT_ONCE):
            size, began = min(_AT_ONCE, end - at), time.monotonic()
            for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
                if libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), advice):
                    number = ctypes.get_errno()
                    _log.debug("madvise %d of %d MiB: error %d", advice, size >> 20, number)
            time.sleep(_PAUSE * (time.monotonic() - began))
