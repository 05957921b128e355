"""Dynamic-width speculative beam decoding: beam quality at speculative-decoding speed.

    with dsbd_ort.Pipeline.from_bundle("bundle/") as pipe:
        print(pipe.generate("def read_json(", num_beams=4).sequences[0].text)

The names below are imported when first used, so that ``dsbd_ort.decoding`` needs numpy alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dsbd_ort.version import __version__

if TYPE_CHECKING:
    from dsbd_ort.decoding import DecodingConfig
    from dsbd_ort.generated import GeneratedSequence, GenerationResult, StreamStep
    from dsbd_ort.pipeline import Pipeline

__all__ = [
    "DecodingConfig",
    "GeneratedSequence",
    "GenerationResult",
    "Pipeline",
    "StreamStep",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {"DecodingConfig": "decoding", "Pipeline": "pipeline"}.get(name, "generated")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
