"""Dynamic-width speculative beam decoding: beam quality at speculative-decoding speed.

    with dsbd_ort.Pipeline.from_bundle("bundle/") as pipe:
        print(pipe.generate("def read_json(", num_beams=4).sequences[0].text)

Pipeline           an opened bundle: generate, stream, chat_prompt
Service            concurrent requests over one pipeline, within ServiceLimits
DecodingConfig     the options of a request
GenerationResult   the GeneratedSequences, best first, and statistics; streaming yields StreamPieces
RequestTrace       the record of a request, which write_trace draws
JsonSchema         constraints, with JsonObject, Regex, Choice, Lark, Canonical, TokenTrie and
                   AllowedTokens
DsbdError          the base of all errors

Every name but ``DsbdError`` is imported on first use, so that ``import dsbd_ort`` is cheap and
``dsbd_ort.decoding`` needs numpy alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dsbd_errors import DsbdError
from dsbd_ort.version import __version__

if TYPE_CHECKING:
    from dsbd_ort.constraints import (
        AllowedTokens,
        Canonical,
        Choice,
        JsonObject,
        JsonSchema,
        Lark,
        Regex,
        TokenTrie,
    )
    from dsbd_ort.decoding import DecodingConfig, RequestTrace
    from dsbd_ort.engine import Service, ServiceLimits
    from dsbd_ort.pipeline import Pipeline
    from dsbd_ort.requests.results import GeneratedSequence, GenerationResult, StreamPiece
    from dsbd_ort.trace_page.trace_file import write_trace

__all__ = [
    "AllowedTokens",
    "Canonical",
    "Choice",
    "DecodingConfig",
    "DsbdError",
    "GeneratedSequence",
    "GenerationResult",
    "JsonObject",
    "JsonSchema",
    "Lark",
    "Pipeline",
    "Regex",
    "RequestTrace",
    "Service",
    "ServiceLimits",
    "StreamPiece",
    "TokenTrie",
    "__version__",
    "write_trace",
]

_GRAMMARS = ("Canonical", "Choice", "JsonObject", "JsonSchema", "Lark", "Regex")
_HOMES = {
    **dict.fromkeys(("AllowedTokens", *_GRAMMARS, "TokenTrie"), "constraints"),
    **dict.fromkeys(("DecodingConfig", "RequestTrace"), "decoding"),
    **dict.fromkeys(("GeneratedSequence", "GenerationResult", "StreamPiece"), "requests.results"),
    **dict.fromkeys(("Service", "ServiceLimits"), "engine"),
    "Pipeline": "pipeline",
    "write_trace": "trace_page.trace_file",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
