"""Text in, text out: a bundle, its tokenizer and the decoding loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from dsbd_ort.cost_cache import engine_costs
from dsbd_ort.decoding import DecodeResult, DecodingConfig, DecodingRequest, TraceRecorder
from dsbd_ort.decoding.cost_curve import EngineCosts
from dsbd_ort.decoding.decode import Iterations, iterations_of
from dsbd_ort.decoding.throughput import AcceptanceEstimator
from dsbd_ort.generated import GeneratedSequence, GenerationResult, StreamStep
from dsbd_ort.kept_rows import KeptRows
from dsbd_ort.memory_error import capacity_error
from dsbd_ort.prompt_ids import check_context, prompt_ids
from dsbd_ort.request_lock import RequestLock
from dsbd_ort.stop_strings import StopSearch, text_before_stop
from dsbd_ort.text_stream import TextStream
from dsbd_runtime.bundle import Bundle, open_bundle
from dsbd_runtime.causal_lm import CausalLM
from dsbd_runtime.chat_template import ChatTemplate, Message
from dsbd_runtime.loading import load_pair
from dsbd_runtime.tokenizer import Tokenizer

MOST_EXPERIENCES = 64
"""Settings (strategy, width and warping) for which draft_policy "throughput" remembers how often
drafts were accepted; those not used for longest are forgotten, and learned anew."""


class Pipeline:
    """An opened bundle, ready to generate; may be shared by threads.

    A request holds it from its start to its end (a stream until it is read to the end or closed);
    those of other threads wait. Each gets what it would get alone.

    Attributes:
        bundle, tokenizer: what was opened.
        reuses_prefix: whether rows of a prompt serve others that begin alike.
    """

    def __init__(
        self,
        bundle: Bundle,
        target: CausalLM,
        draft: CausalLM,
        measure: Callable[[], EngineCosts],
        *,
        prefix_cache: bool = True,
    ) -> None:
        """Take the opened parts; ``from_bundle`` is the usual way.

        ``measure`` returns the costs of both engines; it is called when they are first needed.
        """
        self.bundle = bundle
        self.tokenizer = Tokenizer.from_bundle(bundle)
        self._chat_template: ChatTemplate | None = None
        self._target = target
        self._draft = draft
        self._measure = measure
        self._costs: EngineCosts | None = None
        self._lock = RequestLock()
        self.reuses_prefix = prefix_cache
        self._rows = KeptRows(target, draft, are_reused=prefix_cache)
        self._experience: OrderedDict[object, AcceptanceEstimator] = (
            OrderedDict()
        )  # latest used last

    @classmethod
    def from_bundle(
        cls,
        path: str | os.PathLike[str],
        *,
        provider: str = "cpu",
        draft_provider: str | None = None,
        num_threads: int | None = None,
        cuda_graphs: bool = False,
        verify: bool = False,
        prefix_cache: bool = True,
    ) -> Pipeline:
        """Open the bundle at ``path`` on an execution provider.

        Args:
            path: the folder that dsbd-export wrote.
            provider: a name of the table in docs/gpu.md; "cuda:1" is the second GPU.
            draft_provider: where the draft runs; None means where the target does.
            num_threads: on the CPU of the target, and of a draft that is not small; None lets ONNX
                Runtime choose. See load_pair.
            cuda_graphs: on "cuda", capture each size of call once and replay it.
            verify: also check the hash of every file.
            prefix_cache: keep the rows of a request for the next one, which computes only what
                its prompt does not share with them.

        Raises:
            BundleError: the bundle is absent, damaged or contradictory.
            ProviderError: the provider is unknown or not on this machine.
        """
        bundle = open_bundle(path, verify=verify)
        target, draft = load_pair(
            bundle,
            provider=provider,
            draft_provider=draft_provider,
            num_threads=num_threads,
            cuda_graphs=cuda_graphs,
        )
        graphs = ["graphs"] if cuda_graphs else []
        settings = dict.fromkeys([provider, draft_provider or provider, *graphs])
        measure = functools.partial(
            engine_costs,
            bundle,
            target,
            draft,
            provider=" ".join(settings),
            num_threads=num_threads,
        )
        return cls(bundle, target, draft, measure, prefix_cache=prefix_cache)

    def close(self) -> None:
        """Wait for the requests of other threads, then release both engines and their caches."""
        with contextlib.nullcontext() if self._lock.is_own else self._lock.held():
            self._target.close()
            self._draft.close()

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
            trace: is told what every iteration did; a ``RequestTrace`` remembers it.
            options: see DecodingConfig. ``eos_token_id`` None means the model's own.

        Raises:
            DecodingError: the options or the prompt make no sense.
            CapacityError: prompt and new tokens do not fit the model's context, or the memory.
            BusyError: this thread has a stream that is not finished.
            EngineError: an engine failed in a call.
        """
        request = self.prepare(prompt, options, trace=trace)
        steps = self._steps(request)
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                return self.with_text(stop.value, request.config)

    def stream(
        self, prompt: str | Sequence[int], *, trace: TraceRecorder | None = None, **options: Any
    ) -> Generator[StreamStep, None, GenerationResult]:
        """Continue a prompt step by step; yield what is final, return the whole result.

        A step comes after every iteration, an empty one while the live beams disagree, so that a
        caller may give up in between; the last one brings the rest of the best sequence. The
        texts together are the text of that sequence. See ``generate`` for arguments and errors.
        """
        request = self.prepare(prompt, options, trace=trace)
        texts = TextStream(self.tokenizer, request.config.stop_texts)
        steps = self._steps(request)
        with contextlib.closing(steps):
            while True:
                try:
                    yield texts.push(next(steps))
                except StopIteration as stop:
                    result = self.with_text(stop.value, request.config)
                    yield texts.finish(result.sequences[0])
                    return result

    def prepare(
        self,
        prompt: str | Sequence[int],
        options: Mapping[str, Any],
        *,
        trace: TraceRecorder | None = None,
    ) -> DecodingRequest:
        """Return what ``generate`` would decode, checked against this bundle; no engine is used."""
        config = self._config(options)
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
        """Return the request with what its drafting policy must know.

        That may have to be measured first: only for who holds the engines.
        """
        config = request.config
        if config.draft_policy != "throughput":
            return request
        laws = (config.strategy, config.width, config.temperature, config.top_k, config.top_p)
        return dataclasses.replace(
            request, costs=self._engine_costs(), estimator=self._experience_of(laws)
        )

    def _experience_of(self, laws: object) -> AcceptanceEstimator:
        """Return what requests of these settings have learned; only for who holds the engines."""
        experience = self._experience.pop(laws, None) or AcceptanceEstimator.initial()
        self._experience[laws] = experience
        if len(self._experience) > MOST_EXPERIENCES:
            self._experience.popitem(last=False)
        return experience

    def with_text(self, result: DecodeResult, config: DecodingConfig) -> GenerationResult:
        """Return a decoded request with the text of its sequences."""
        sequences = []
        for sequence in result.sequences:
            text = text_before_stop(self.tokenizer.decode(sequence.token_ids), config.stop_texts)
            sequences.append(GeneratedSequence(**vars(sequence), text=text))
        return GenerationResult(sequences, result.stats)

    @contextlib.contextmanager
    def engines(self) -> Iterator[tuple[CausalLM, CausalLM]]:
        """Hold target and draft, caches empty; requests of other threads wait for the end."""
        with self._lock.held():
            self._engine_costs()  # later the caches will be in use
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
        """Return the token ids of a conversation, filled into the checkpoint's chat template.

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

    def _steps(self, request: DecodingRequest) -> Iterations:
        """Hold the pipeline for one request."""
        with self._lock.held(), self._told_errors():
            request = self.planned(request)
            self._rows.drop_but_for(request.prompt_ids[:-1])
            steps = iterations_of(request, self._target, self._draft, self._rows.prefixes)
            return self.with_peak((yield from steps))

    def with_peak(self, result: DecodeResult) -> DecodeResult:
        """Return a decoded request with the most that both caches took."""
        kv_bytes_peak = self._target.kv_bytes_peak + self._draft.kv_bytes_peak
        stats = dataclasses.replace(result.stats, kv_bytes_peak=kv_bytes_peak)
        return dataclasses.replace(result, stats=stats)

    @contextlib.contextmanager
    def _told_errors(self) -> Iterator[None]:
        """Leave no row of a request that fails to the next; say what a lack of memory means."""
        try:
            yield
        except GeneratorExit:  # a stream was closed: all rows are right
            raise
        except BaseException as error:
            self._rows.forget()
            if isinstance(error, MemoryError):
                raise capacity_error(error) from error
            raise

    def _empty_caches(self) -> None:
        self._rows.forget()
        self._rows.drop_but_for([])

    def _engine_costs(self) -> EngineCosts:
        if self._costs is None:
            self._rows.forget()  # measuring empties the caches
            self._costs = self._measure()
        return self._costs

    def _config(self, options: Mapping[str, Any]) -> DecodingConfig:
        options = dict(options)
        if options.get("eos_token_id") is None:
            options["eos_token_id"] = tuple(self.bundle.manifest.target.eos_token_ids)
        return DecodingConfig.from_options(options)
