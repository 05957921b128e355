"""The import of onnxruntime, with its telemetry switched off."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

TELEMETRY_SWITCH = "ORT_DISABLE_TELEMETRY"


def onnxruntime_module() -> ModuleType:
    """Return the module onnxruntime.

    From 1.29 on its wheels tell Microsoft of every session opened, unless ``TELEMETRY_SWITCH`` is
    in the environment when it is first used: it is put there unless the user has set it. (Its
    thread also outlives the main function of a host that is not Python, and reads freed memory.)

    Raises:
        ImportError: no package that brings the module is installed.
    """
    os.environ.setdefault(TELEMETRY_SWITCH, "1")
    return importlib.import_module("onnxruntime")
