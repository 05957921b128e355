"""What TensorRT says while it builds or runs: errors are kept for messages, the rest is logged."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

_log = logging.getLogger(__name__)


def trt_logger(trt: ModuleType, errors: list[str]) -> Any:
    """Return a logger to give to ``trt``, which appends to ``errors`` what went wrong.

    TensorRT tells by a return value only that something failed; why, it tells its logger alone.
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
            _log.log(min(level, logging.INFO), "%s", message)  # errors are raised by who asked

    return Logger()


def first_reason(errors: list[str]) -> str:
    """Return the first error in one line of bounded length."""
    text = " ".join(errors[0].split()) if errors else "it gave no reason"
    return text if len(text) <= 300 else f"{text[:297]}..."
