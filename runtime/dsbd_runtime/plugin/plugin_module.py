"""Plug-ins of ONNX Runtime: a library that is registered once in a process, and its devices."""

import importlib
import threading
from types import ModuleType
from typing import Any

from dsbd_runtime.engine.providers import Provider
from dsbd_runtime.errors import ProviderError

_registering = threading.Lock()
_registered: dict[str, str] = {}  # names of providers in ONNX Runtime by module, once registered
TURNS = threading.RLock()
"""Held by whoever calls a plug-in: all sessions of a process share one queue of work."""


def plugin_devices(ort: ModuleType, provider: Provider) -> list[Any]:
    """Return the devices of a plug-in; raise ProviderError if the package or a device is missing.

    The library stays registered: unregistering it aborts the process if a session is open.
    """
    with _registering:
        if provider.module not in _registered:
            try:
                module = importlib.import_module(provider.module)
                ort.register_execution_provider_library(provider.name, module.get_library_path())
            except Exception as error:  # of the import, or one of ONNX Runtime
                raise ProviderError(
                    f"provider {provider.name!r} needs the plug-in {provider.module}, which cannot "
                    f"be loaded ({' '.join(str(error).split())}); {provider.install_line}"
                ) from error
            _registered[provider.module] = module.get_ep_name()
    name = _registered[provider.module]
    devices = [device for device in ort.get_ep_devices() if device.ep_name == name]
    if not devices:
        raise ProviderError(
            f"provider {provider.name!r} finds no GPU; install the GPU's driver (on Linux with "
            "Vulkan), or use provider 'cpu'"
        )
    return devices


def plugin_device(ort: ModuleType, provider: Provider, device_id: int) -> Any:
    """Return one device of a plug-in; raise ProviderError if it is missing."""
    devices = plugin_devices(ort, provider)
    if device_id >= len(devices):
        raise ProviderError(
            f"there is no device {provider.name}:{device_id}, this machine has {len(devices)}; "
            f"choose {provider.name}:0"
            + (f" to {provider.name}:{len(devices) - 1}" if len(devices) > 1 else "")
        )
    return devices[device_id]
