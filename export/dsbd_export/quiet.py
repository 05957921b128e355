"""Keep the chatter of torch and transformers from the user while they work."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

from transformers.utils import logging as transformers_logging


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence warnings, log lines below ERROR and progress bars inside the block.

    What matters among them is checked by us and raised: missing weights, unused hooks, parity.
    """
    torch_logger = logging.getLogger("torch.onnx")
    torch_level, verbosity = torch_logger.level, transformers_logging.get_verbosity()
    had_progress = transformers_logging.is_progress_bar_enabled()
    torch_logger.setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            for category in (UserWarning, FutureWarning, DeprecationWarning):
                warnings.simplefilter("ignore", category)
            yield
    finally:
        torch_logger.setLevel(torch_level)
        transformers_logging.set_verbosity(verbosity)
        if had_progress:
            transformers_logging.enable_progress_bar()
