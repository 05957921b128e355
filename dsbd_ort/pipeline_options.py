"""How a bundle is opened, as an object and as keyword arguments that are typed alike."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, get_args

from dsbd_ort.decoding.errors import ConfigError
from dsbd_ort.decoding.native_decoder import Loop
from dsbd_ort.decoding.option_values import Domain, OneOf, Whole, did_you_mean, shown
from dsbd_runtime.engine.settings import EngineSettings


@dataclass(frozen=True)
class _Name:
    """Domain of texts; with ``is_path``, of folder paths, which are stored as texts."""

    expected: str
    is_path: bool = False

    def read(self, name: str, value: object) -> str:
        text = os.fspath(value) if self.is_path and isinstance(value, os.PathLike) else value
        if not isinstance(text, str) or (self.is_path and not _may_name_a_file(text)):
            raise ConfigError(f"{name} is {shown(value)}; expected {self.expected}")
        return text


def _may_name_a_file(text: str) -> bool:
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return True
    except (OSError, ValueError):  # too long, or with characters that no file name may have
        return False
    return True


_PROVIDER = _Name("a text such as 'cpu'")
_BOOL = OneOf((False, True))
_MOST = 2**31 - 1
SERVER_NGRAM_POOL = 0
"""A server's default: the speed of accepted drafts would reveal other clients' texts."""
_DOMAINS: dict[str, Domain] = {
    "provider": _PROVIDER,
    "draft_provider": _PROVIDER,
    "num_threads": Whole(1, _MOST),
    "spin_us": Whole(0, _MOST),
    "engine_cache": _Name("the path of a folder", is_path=True),
    "cuda_graphs": _BOOL,
    "verify": _BOOL,
    "prefix_cache": _BOOL,
    "generation_config": _BOOL,
    "chat_defaults": _BOOL,
    "ngram_pool": Whole(0, _MOST),
    "loop": OneOf(get_args(Loop)),
}


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(EngineSettings):
    """How a bundle is opened: keywords of ``Pipeline.from_bundle``, fields of the C API's settings.

    Attributes:
        provider: an execution provider of the table in docs/gpu.md; "cuda:1" is the second GPU.
        draft_provider: the draft's provider; None means the target's.
        verify: also check the hash of every file.
        prefix_cache: keep cache rows between requests, so that only the part of a prompt after the
            common prefix is computed.
        generation_config: take the options that a request leaves out from the bundle's
            generation_config.json.
        chat_defaults: use defaults for chats: temperature 0.7 and top_p 0.9, unless the request or
            generation_config.json says how to sample, and answers that fill the context, up to
            2,048 tokens.
        ngram_pool: number of tokens of earlier requests' texts that the n-gram drafter searches
            too; 0: it searches only the request's text.
        loop: "python" decodes in numpy, "native" with the C++ core (dsbd_ort_native); both give the
            same results. "auto" uses the core if it is installed and supports the request
            (docs/python.md).
    """

    provider: str = "cpu"
    draft_provider: str | None = None
    verify: bool = False
    prefix_cache: bool = True
    generation_config: bool = True
    chat_defaults: bool = False
    ngram_pool: int = 16_384
    loop: Loop = "auto"

    def __post_init__(self) -> None:
        for name, domain in _DOMAINS.items():
            value = getattr(self, name)
            if value is not None or getattr(PipelineOptions, name) is not None:
                object.__setattr__(self, name, domain.read(name, value))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> PipelineOptions:
        """Return the options that keyword arguments give; raise ConfigError for an unknown name."""
        if unknown := sorted(set(options) - set(_DOMAINS), key=str):
            close = did_you_mean(unknown[0], _DOMAINS)
            expected = close or f"; expected one of {', '.join(_DOMAINS)}"
            raise ConfigError(f"unknown option {shown(unknown[0])}{expected}")
        return cls(**options)


class OpeningOptions(TypedDict, total=False):
    """The fields of PipelineOptions as keyword arguments; see PipelineOptions."""

    provider: str
    draft_provider: str | None
    num_threads: int | None
    spin_us: int | None
    engine_cache: str | None
    cuda_graphs: bool | None
    verify: bool
    prefix_cache: bool
    generation_config: bool
    chat_defaults: bool
    ngram_pool: int
    loop: Loop
