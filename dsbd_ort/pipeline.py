"""Text in, text out: an opened bundle, its tokenizer and the decoding loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec

import numpy as np

from dsbd_ort.decoding import (
    DecodeResult,
    DecodingConfig,
    DecodingRequest,
    TraceRecorder,
    WithResult,
    result_of,
)
from dsbd_ort.decoding.cost_curve import Costs, LearnedCosts
from dsbd_ort.decoding.decode import Iterations, iterations_of
from dsbd_ort.model_pair import KeptEstimators, KeptRows, RequestLock, capacity_error
from dsbd_ort.prompts import check_context, prompt_ids
from dsbd_ort.results import (
    GeneratedSequence,
    GenerationResult,
    StopSearch,
    StreamPiece,
    TextStream,
    text_before_stop,
)
from dsbd_runtime.bundle import Bundle, open_bundle
from dsbd_runtime.causal_lm import CausalLM
from dsbd_runtime.chat_template import ChatTemplate, Message
from dsbd_runtime.errors import InputError
from dsbd_runtime.loading import load_causal_lm, load_pair
from dsbd_runtime.tokenizer import Tokenizer

BundlePath = str | os.PathLike[str]
Keywords = ParamSpec("Keywords")


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How a bundle is opened: the keywords of ``Pipeline.from_bundle``, the fields of C's settings.

    Attributes:
        provider: an execution provider of the table in docs/gpu.md; "cuda:1" is the second GPU.
        draft_provider: the provider of the draft; None means that of the target.
        num_threads: on the CPU, threads of the target, and of a draft that is not small; None lets
            ONNX Runtime choose. See load_pair.
        cuda_graphs: on "cuda", capture each size of call once and replay it.
        verify: also check the hash of every file.
        prefix_cache: keep cache rows between requests, so that of a prompt only the part behind
            the common prefix is computed.
    """

    provider: str = "cpu"
    draft_provider: str | None = None
    num_threads: int | None = None
    cuda_graphs: bool = False
    verify: bool = False
    prefix_cache: bool = True


@dataclass(frozen=True, kw_only=True)
class PipelineSettings(PipelineOptions):
    """The folder of a bundle and how it is opened; can be sent to another process."""

    bundle: Path

    def open(self) -> Pipeline:
        """Open the bundle."""
        return Pipeline.from_options(self.bundle, self)


def _with_keywords_of(
    options: Callable[Keywords, PipelineOptions],
) -> Callable[
    [Callable[[type[Pipeline], BundlePath, PipelineOptions], Pipeline]],
    Callable[Concatenate[type[Pipeline], BundlePath, Keywords], Pipeline],
]:
    """Let a method that takes ``options`` take their fields as keywords, typed and completed."""

    def decorate(
        method: Callable[[type[Pipeline], BundlePath, PipelineOptions], Pipeline],
    ) -> Callable[Concatenate[type[Pipeline], BundlePath, Keywords], Pipeline]:
        @functools.wraps(method)
        def from_keywords(
            cls: type[Pipeline], path: BundlePath, *args: Keywords.args, **kwargs: Keywords.kwargs
        ) -> Pipeline:
            return method(cls, path, options(*args, **kwargs))

        own = [p for p in signature(method).parameters.values() if p.name != "options"]
        keywords = signature(options).parameters.values()
        shown = signature(method).replace(parameters=[*own, *keywords])
        from_keywords.__signature__ = shown  # type: ignore[attr-defined]
        return from_keywords  # type: ignore[return-value]  # path may be a keyword too

    return decorate


class Pipeline:
    """An opened bundle, ready to generate; may be shared by threads.

    A request holds it from start to end (a stream until it is read to the end or closed) while
    those of other threads wait. Each request returns what it would return alone.

    Attributes:
        bundle, tokenizer: the opened bundle and its tokenizer.
        costs: of the engines' calls, learned as requests make them.
        reuses_prefix: whether cache rows are reused for prompts with a common prefix.
    """

    def __init__(
        self,
        bundle: Bundle,
        target: CausalLM,
        draft: CausalLM | None,
        *,
        costs: Costs | None = None,
        prefix_cache: bool = True,
    ) -> None:
        """Take the opened parts; ``from_bundle`` opens them.

        Without a draft only strategies without one are taken. ``costs`` None are learned.
        """
        self.bundle = bundle
        self.tokenizer = Tokenizer.from_bundle(bundle)
        self._chat_template: ChatTemplate | None = None
        self._target = target
        self._draft = draft
        self.costs = costs or LearnedCosts(bundle.num_bytes("target"), bundle.num_bytes("draft"))
        self._lock = RequestLock()
        self.reuses_prefix = prefix_cache
        self._rows = KeptRows(self._models, are_reused=prefix_cache)
        self._estimators = KeptEstimators()

    @classmethod
    @_with_keywords_of(PipelineOptions)
    def from_bundle(cls, path: BundlePath, options: PipelineOptions) -> Pipeline:
        """Open the bundle in the folder ``path``; keywords are the fields of PipelineOptions.

        Raises:
            BundleError: the bundle is absent, damaged or contradictory.
            ProviderError: the provider is unknown or not on this machine.
        """
        return cls.from_options(path, options)

    @classmethod
    def from_options(cls, path: BundlePath, options: PipelineOptions) -> Pipeline:
        """See ``from_bundle``."""
        bundle = open_bundle(path, verify=options.verify)
        if "draft" not in bundle.roles:
            return cls._without_draft(bundle, options)
        target, draft = load_pair(
            bundle,
            provider=options.provider,
            draft_provider=options.draft_provider,
            num_threads=options.num_threads,
            cuda_graphs=options.cuda_graphs,
        )
        return cls(bundle, target, draft, prefix_cache=options.prefix_cache)

    @classmethod
    def _without_draft(cls, bundle: Bundle, options: PipelineOptions) -> Pipeline:
        if options.draft_provider is not None:
            raise InputError(
                f"draft_provider is {options.draft_provider!r}, but the bundle {bundle.path} has "
                "no draft; leave it out"
            )
        target = load_causal_lm(
            bundle,
            "target",
            provider=options.provider,
            num_threads=options.num_threads,
            cuda_graphs=options.cuda_graphs,
        )
        return cls(bundle, target, None, prefix_cache=options.prefix_cache)

    @property
    def _models(self) -> list[CausalLM]:
        return [self._target] if self._draft is None else [self._target, self._draft]

    def close(self) -> None:
        """Wait for the requests of other threads, then release both engines and their caches."""
        with contextlib.nullcontext() if self._lock.is_own else self._lock.held():
            for model in self._models:
                model.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self, prompt: str | Sequence[int], *, trace: TraceRecorder | None = None, **options: Any
    ) -> GenerationResult:
        """Continue a prompt; further keyword arguments are the fields of ``DecodingConfig``.

        Args:
            prompt: text, or token ids.
            trace: records every iteration; usually a ``RequestTrace``.
            options: see DecodingConfig. ``eos_token_id`` None means the model's own.

        Raises:
            DecodingError: the options or the prompt are invalid.
            CapacityError: prompt and new tokens do not fit the model's context, or the memory.
            BusyError: this thread has a stream that is not finished.
            EngineError: an engine failed in a call.
        """
        request = self.prepare(prompt, options, trace=trace)
        return self.with_text(result_of(self._iterations(request)), request.config)

    def stream(
        self, prompt: str | Sequence[int], *, trace: TraceRecorder | None = None, **options: Any
    ) -> Generator[StreamPiece, None, GenerationResult]:
        """Stream the continuation of a prompt: yield final tokens and text, return the result.

        Every iteration yields one piece, empty while the live beams disagree, so that a caller may
        stop between iterations; the last piece holds the rest of the best sequence. The texts
        together are the text of that sequence. See ``generate`` for arguments and errors.
        """
        request = self.prepare(prompt, options, trace=trace)
        texts = TextStream(self.tokenizer, request.config.stop_texts)
        with contextlib.closing(self._iterations(request)) as iterations:
            outputs = WithResult(iterations)
            for output in outputs:
                yield texts.push(output)
        result = self.with_text(outputs.result, request.config)
        yield texts.finish(result.sequences[0])
        return result

    def prepare(
        self,
        prompt: str | Sequence[int],
        options: Mapping[str, Any],
        *,
        trace: TraceRecorder | None = None,
    ) -> DecodingRequest:
        """Return the validated request that ``generate`` would decode; no engine is called."""
        config = self._config(options)
        if config.row.has_draft:
            self.bundle.entry("draft")  # refuse a bundle without one
        token_ids = prompt_ids(self.tokenizer, prompt)
        check_context(self.bundle, len(token_ids), config.max_new_tokens)
        return DecodingRequest(
            prompt_ids=token_ids,
            config=config,
            rng=np.random.default_rng(config.seed),
            stop=StopSearch(self.tokenizer, config.stop_texts) if config.stop_texts else None,
            trace=trace,
        )

    def planned(self, request: DecodingRequest) -> DecodingRequest:
        """Return the request with the costs and the acceptance estimator of its draft policy."""
        config = request.config
        if config.draft_policy != "throughput":
            return request
        setting = (config.strategy, config.width, config.temperature, config.top_k, config.top_p)
        return dataclasses.replace(
            request, costs=self.costs, estimator=self._estimators.of(setting)
        )

    def with_text(self, result: DecodeResult, config: DecodingConfig) -> GenerationResult:
        """Return a decoding result with the text of its sequences."""
        sequences = []
        for sequence in result.sequences:
            text = text_before_stop(self.tokenizer.decode(sequence.token_ids), config.stop_texts)
            sequences.append(GeneratedSequence(**vars(sequence), text=text))
        return GenerationResult(sequences, result.stats)

    @contextlib.contextmanager
    def engines(self) -> Iterator[tuple[CausalLM, CausalLM]]:
        """Hold target and draft with empty caches, while requests of other threads wait.

        Raises InputError for a bundle without a draft.
        """
        self.bundle.entry("draft")
        assert self._draft is not None  # as the bundle has one
        with self._lock.held():
            try:
                self._empty_caches()
                yield self._target, self._draft
            finally:
                self._empty_caches()

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, rendered with the checkpoint's chat template.

        They are a prompt for ``generate`` and ``stream``. See ChatTemplate.render.

        Raises:
            BundleError: the bundle has no chat template.
            InputError: the template refuses the messages.
        """
        if self._chat_template is None:
            self._chat_template = ChatTemplate.from_folder(self.bundle.path)
        text = self._chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _iterations(self, request: DecodingRequest) -> Iterations:
        """Hold the pipeline for one request."""
        with self._lock.held(), self._failures_cleaned_up():
            request = self.planned(request)
            self._rows.drop_but_for(request.prompt_ids[:-1])
            iterations = iterations_of(request, self._target, self._draft, self._rows.prefixes)
            return self.with_peak((yield from iterations))

    def with_peak(self, result: DecodeResult) -> DecodeResult:
        """Return a decoding result with the peak memory of all caches."""
        kv_bytes_peak = sum(model.kv_bytes_peak for model in self._models)
        kv_bytes_peak += result.distribution_bytes_peak
        stats = dataclasses.replace(result.stats, kv_bytes_peak=kv_bytes_peak)
        return dataclasses.replace(result, stats=stats)

    @contextlib.contextmanager
    def _failures_cleaned_up(self) -> Iterator[None]:
        """Reuse no row of a request that fails; turn a MemoryError into a CapacityError."""
        try:
            yield
        except GeneratorExit:  # a stream was closed: its rows are valid
            raise
        except BaseException as error:
            self._rows.forget()
            if isinstance(error, MemoryError):
                raise capacity_error(error) from error
            raise

    def _empty_caches(self) -> None:
        self._rows.forget()
        self._rows.drop_but_for([])

    def _config(self, options: Mapping[str, Any]) -> DecodingConfig:
        options = dict(options)
        if options.get("eos_token_id") is None:
            options["eos_token_id"] = tuple(self.bundle.manifest.target.eos_token_ids)
        return DecodingConfig.from_options(options).settled(costs_are_known=True)
