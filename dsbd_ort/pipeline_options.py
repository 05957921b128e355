"""How a bundle is opened, as an object and as keyword arguments that are typed alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How a bundle is opened: the keywords of ``Pipeline.from_bundle``, the fields of C's settings.

    Attributes:
        provider: an execution provider of the table in docs/gpu.md; "cuda:1" is the second GPU.
        draft_provider: the provider of the draft; None means that of the target.
        num_threads: on the CPU, threads of the target, and of a draft that is not small; None lets
            ONNX Runtime choose. See load_pair.
        spin_us: on the CPU, microseconds for which an idle engine thread waits busily before it
            sleeps; None is 20.
        engine_cache: on the CPU, a folder for engines as ONNX Runtime runs them, which the next
            opening maps; None: every opening optimizes and packs them again.
        cuda_graphs: on a GPU, capture each size of call that returns once and replay it; None: on
            "cuda" yes, on TensorRT no.
        unfused_attention: on "cuda", attention of two products and a softmax, which copies no keys
            and values to every query head; quicker for long caches and short forwards.
        verify: also check the hash of every file.
        prefix_cache: keep cache rows between requests, so that of a prompt only the part behind
            the common prefix is computed.
        generation_config: take what a request leaves out from the bundle's generation_config.json.
        chat_defaults: requests are chats: where neither they nor generation_config.json say how to
            sample, with temperature 0.7 and top_p 0.9; answers as long as the context holds, up to
            2,048 tokens.
        ngram_pool: tokens of earlier requests' texts that the n-gram drafter looks through as well;
            0: none of another request's.
    """

    provider: str = "cpu"
    draft_provider: str | None = None
    num_threads: int | None = None
    spin_us: int | None = None
    engine_cache: str | None = None
    cuda_graphs: bool | None = None
    unfused_attention: bool = False
    verify: bool = False
    prefix_cache: bool = True
    generation_config: bool = True
    chat_defaults: bool = False
    ngram_pool: int = 16_384


class OpeningOptions(TypedDict, total=False):
    """The fields of PipelineOptions as keyword arguments; see there."""

    provider: str
    draft_provider: str | None
    num_threads: int | None
    spin_us: int | None
    engine_cache: str | None
    cuda_graphs: bool | None
    unfused_attention: bool
    verify: bool
    prefix_cache: bool
    generation_config: bool
    chat_defaults: bool
    ngram_pool: int
