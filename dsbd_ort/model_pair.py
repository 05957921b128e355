"""The target and draft of a pipeline: their use, and what they keep between requests.

They keep cache rows, costs of calls, and acceptance estimators for draft_policy "throughput".
"""

import contextlib
import dataclasses
import threading
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from dsbd_errors import DsbdError
from dsbd_forward.forward import Source
from dsbd_ort.decoding import DecodeResult, DecodingConfig, DecodingRequest, result_of
from dsbd_ort.decoding.decoder import Decoder
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import Costs, LearnedCosts, learn_from_first_calls
from dsbd_ort.decoding.native_decoder import new_decoder
from dsbd_ort.decoding.set_up import check_decodable
from dsbd_ort.decoding.whole_requests import Iterations, decoded_alone, decoded_together
from dsbd_ort.pipeline_options import PipelineOptions
from dsbd_ort.requests.recent import Recent
from dsbd_runtime.bundle_files.bundle import Bundle, ModelEntry
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.errors import CapacityError, InputError
from dsbd_runtime.loading import load_causal_lm, load_pair
from dsbd_runtime.parts.source.sources import Sources

MOST_ESTIMATORS = 64
"""Number of settings (strategy, width, warping) for which draft_policy "throughput" stores how
often drafts were accepted. The least recently used setting is dropped, and learned again."""
_TOGETHER = 8  # how many requests of a list share the engine calls


class BusyError(DsbdError):
    """The calling thread already holds an unfinished stream of the pipeline."""


class RequestLock:
    """Exclusive use of a pipeline by one request; a stream may end in another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # not an RLock: only its owner could release it
        self._owner: int | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the requests of other threads; raise BusyError if this thread has one."""
        if self.is_own:
            raise BusyError(
                "this thread has a stream of this pipeline that is not finished, and would wait "
                "for itself; read the stream to its end, close() it, or open a second pipeline"
            )
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    @property
    def is_own(self) -> bool:
        return self._owner == threading.get_ident()


def drafting_setting(config: DecodingConfig) -> Hashable:
    """Return the options of a request on which the acceptance of drafts depends."""
    warping = config.temperature, config.top_k, config.top_p
    is_predicted = bool(config.predicted_token_ids)
    return (
        config.strategy,
        config.num_beams,
        config.drafter,
        bool(config.constraint),
        is_predicted,
        *warping,
    )


def new_estimator(config: DecodingConfig, draft: ModelEntry | None) -> AcceptanceEstimator:
    """Return the estimator of a new setting, which begins with the agreement of its draft."""
    measured = draft.agreement if draft is not None and config.has_draft_model else None
    return AcceptanceEstimator.of_pair(None if measured is None else measured.best)


def capacity_error(error: MemoryError) -> CapacityError:
    """Return the error of a request that ran out of memory."""
    return CapacityError(
        f"no memory for this request ({error}); use fewer beams, a shorter draft or fewer new "
        "tokens"
    )


def loaded_pair(bundle: Bundle, options: PipelineOptions) -> tuple[CausalLM, CausalLM | None]:
    """Return the engines of the target and, if the bundle has one, of the draft."""
    if "draft" in bundle.roles:
        return load_pair(
            bundle,
            provider=options.provider,
            draft_provider=options.draft_provider,
            settings=options,
        )
    if options.draft_provider is not None:
        raise InputError(
            f"draft_provider is {options.draft_provider!r}, but the bundle {bundle.path} has "
            "no draft; leave it out"
        )
    return load_causal_lm(bundle, "target", provider=options.provider, settings=options), None


def learned_costs(bundle: Bundle, draft: CausalLM | None) -> LearnedCosts:
    """Return the costs of a pair, which requests refine; calls the draft if it reads text."""
    costs = LearnedCosts(
        bundle.num_bytes("target"), bundle.num_bytes("draft"), bundle.num_encoder_bytes("draft")
    )
    if draft is None:
        return costs
    encoder = bundle.manifest.target.encoder
    if encoder is None:
        learn_from_first_calls(costs, draft)
    elif encoder.fixed is None:
        learn_from_first_calls(costs, draft, source=(0,))
    return costs


class ModelPair:
    """The opened engines of a bundle, used by one request, list or service at a time.

    target, draft: the engines; draft is None if the bundle has no draft.
    """

    def __init__(
        self,
        bundle: Bundle,
        target: CausalLM,
        draft: CausalLM | None,
        options: PipelineOptions,
        costs: Costs | None,
    ) -> None:
        """Take opened engines. ``costs`` None: learn them."""
        self.target, self.draft = target, draft
        self._draft_entry = bundle.manifest.draft
        self._costs = costs or learned_costs(bundle, draft)
        self._loop, self._reuses_prefix = options.loop, options.prefix_cache
        self._lock = RequestLock()
        self._decoder = self.new_decoder()
        self.estimators: Recent[AcceptanceEstimator] = Recent(MOST_ESTIMATORS)

    @property
    def costs(self) -> Costs:
        """The costs of engine calls, which requests refine; setting them empties the caches."""
        return self._costs

    @costs.setter
    def costs(self, costs: Costs) -> None:
        self._free_memory(None)
        self._costs = costs
        self._decoder = self.new_decoder()

    @property
    def _models(self) -> list[CausalLM]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    def close(self) -> None:
        """Wait for the requests of other threads, then release both engines and their caches."""
        with contextlib.nullcontext() if self._lock.is_own else self._lock.held():
            for model in self._models:
                model.close()

    def check(self, request: DecodingRequest) -> None:
        """Raise DecodingError for a request that these engines cannot decode; calls no engine."""
        check_decodable(request, self.target.spec, self.draft.spec if self.draft else None)

    def new_decoder(self, max_rows: int | None = None) -> Decoder:
        """Return a decoder on the engines; their caches must be empty and otherwise unused."""
        return new_decoder(
            self.target,
            self.draft,
            self._loop,
            max_rows=max_rows,
            shares_prefixes=self._reuses_prefix,
            costs=self.costs,
        )

    def planned(self, request: DecodingRequest) -> DecodingRequest:
        """Return the request with the costs and the acceptance estimator of its draft policy."""
        config, draft = request.config, self._draft_entry
        if config.draft_policy != "throughput":
            return request
        setting = drafting_setting(config)
        estimator = self.estimators.of(setting, lambda: new_estimator(config, draft))
        return dataclasses.replace(request, costs=self.costs, estimator=estimator)

    @contextlib.contextmanager
    def engines(self) -> Iterator[tuple[CausalLM, CausalLM | None]]:
        """Hold target and draft with empty caches; other threads wait."""
        with self._lock.held():
            try:
                self._free_memory(None)
                yield self.target, self.draft
            finally:
                self._free_memory(None)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Hold the engines with the rows that they have; other threads wait.

        No row of a request that fails is reused; a MemoryError becomes a CapacityError.
        """
        with self._lock.held(), self._failures_cleaned_up():
            yield

    @contextlib.contextmanager
    def _failures_cleaned_up(self) -> Iterator[None]:
        try:
            yield
        except GeneratorExit:  # a stream was closed: its rows are valid
            raise
        except BaseException as error:
            self._decoder.forget()
            if isinstance(error, MemoryError):
                raise capacity_error(error) from error
            raise

    @contextlib.contextmanager
    def held_source(self, source: Source) -> Iterator[None]:
        """Keep a source in the engines while several requests, of any thread, read it in turn."""
        with contextlib.ExitStack() as held:
            for model in self._models:
                for sources in model.parts_of(Sources):
                    held.enter_context(sources.slots.held(source))
            yield

    def iterations(self, request: DecodingRequest) -> Iterations:
        """Decode a request: yield the output of every iteration, return its result."""
        with self.used():
            self._free_memory(request)
            iterations = decoded_alone(self._decoder, self.planned(request))
            return self.with_peak((yield from iterations))

    def decoded(self, requests: Sequence[DecodingRequest]) -> list[DecodeResult]:
        """Return the results of requests, which share the engine calls."""
        if len(requests) == 1:
            return [result_of(self.iterations(requests[0]))]
        with self.engines(), self._failures_cleaned_up():
            planned = [self.planned(request) for request in requests]
            results = decoded_together(self._decoder, planned, _TOGETHER)
            return [self.with_peak(each) for each in results]

    def with_peak(self, result: DecodeResult) -> DecodeResult:
        """Return a decoding result with the peak memory of all caches."""
        kv_bytes_peak = sum(model.kv_bytes_peak for model in self._models)
        kv_bytes_peak += result.distribution_bytes_peak
        stats = dataclasses.replace(result.stats, kv_bytes_peak=kv_bytes_peak)
        return dataclasses.replace(result, stats=stats)

    def _free_memory(self, request: DecodingRequest | None) -> None:
        """Free the memory of all rows except those that a request can use."""
        self._decoder.keep_for(request)
        for model in self._models:
            if request is None:
                model.keep(np.arange(0))  # also frees the encoder outputs of sources
            model.shrink()
            model.reset_peak()
