"""The decoder in C++: the interface of BatchedDecoder over the module ``dsbd_ort_native``.

The numpy loop defines what is returned. This one returns the same tokens and log-probabilities, and
takes less time for it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import time
from collections.abc import Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np

from dsbd_forward.engine import Engine
from dsbd_forward.forward import LateSource
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.decoder import Decoder, LiveRequest, Preempted, Progress
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import Costs
from dsbd_ort.decoding.drafting.ngram import NGramPool
from dsbd_ort.decoding.engine_call import Clock
from dsbd_ort.decoding.errors import DecodingError
from dsbd_ort.decoding.request import DecodingRequest
from dsbd_ort.decoding.result import DecodedSequence, DecodeResult, IterationOutput
from dsbd_ort.decoding.set_up import check_decodable
from dsbd_ort.decoding.stats import DecodingStats
from dsbd_ort.decoding.top_tokens import PromptLogprobs, TokenLogprobs
from dsbd_ort.version import __version__

try:
    _native: Any = importlib.import_module("dsbd_ort_native")
except ImportError:
    _native = None
if _native is not None and _native.__version__ != __version__:
    _native = None

Loop = Literal["auto", "python", "native"]

NOT_INSTALLED = f"dsbd_ort_native {__version__} is not installed (pip install ./native/python)"

_NOT_READ = {"constraint", "logits_processors", "scorers", "seed", "predicted_text"}

_estimators: WeakKeyDictionary[AcceptanceEstimator, Any] = WeakKeyDictionary()
_pools: WeakKeyDictionary[NGramPool, Any] = WeakKeyDictionary()
"""The core's own, which learn from its requests."""


def is_installed() -> bool:
    """Return whether the core can be used."""
    return _native is not None


def obstacle(request: DecodingRequest) -> str | None:
    """Return why only the numpy loop decodes a request; None: the core does as well."""
    config = request.config
    if type(request.rng.bit_generator) is not np.random.PCG64:
        return f"rng is of {type(request.rng.bit_generator).__name__}, not PCG64"
    reasons = {
        "its prompt has sound or pictures": isinstance(request.source, LateSource),
        "a trace is recorded": request.trace is not None,
        "logits_processors are given": bool(config.logits_processors),
        "scorers are given": bool(config.scorers),
        "what processors leave is recorded": request.allowed_mass is not None,
        "its caller may give it up": request.gives_up is not None,
        "random_source is given": request.random_source is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class NativeOutput(IterationOutput):
    """The output of an iteration of the core."""

    def __init__(self, output: Any, live: NativeRequest) -> None:
        self._output = output
        self._live = live
        self._num_agreed = len(live.tokens)

    @property
    def agreed_tokens(self) -> list[int]:  # type: ignore[override]  # copied once it is read
        return self._live.tokens[: self._num_agreed]

    def stats(self) -> DecodingStats:
        return DecodingStats(**self._output.stats())

    def agreed_logprobs(self, start: int) -> list[float]:
        return self._live.logprobs[start : self._num_agreed]

    def agreed_top_logprobs(self, start: int) -> list[TokenLogprobs] | None:
        tops = self._live.tops
        return None if tops is None else tops[start : self._num_agreed]


class NativeRequest:
    """A live request of the core; ``tokens`` and what follows: of those that all beams agree on."""

    def __init__(self, handle: Any, request: DecodingRequest) -> None:
        self.handle = handle
        self.request = request
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[TokenLogprobs] | None = [] if request.config.top_logprobs else None

    @property
    def num_rows(self) -> int:
        return int(self.handle.num_rows)

    @property
    def num_rows_at_end(self) -> int:
        return int(self.handle.num_rows_at_end)

    def event(
        self, native_event: Any
    ) -> IterationOutput | Preempted | DecodeResult | BaseException:
        """Convert an event of the core to one of ``Progress``."""
        if isinstance(native_event, BaseException):
            return native_event
        if native_event is None:
            return Preempted()
        if isinstance(native_event, tuple):
            return self._result(*native_event)
        self.tokens += native_event.tokens
        self.logprobs += native_event.logprobs
        if self.tops is not None:
            self.tops += native_event.tops
        return NativeOutput(native_event, self)

    def _result(
        self, sequences: list[dict[str, Any]], stats: dict[str, Any], num_bytes: int, scored: Any
    ) -> DecodeResult:
        if self.tops is None:
            sequences = [{**each, "top_logprobs": None} for each in sequences]
        prompt = None
        if scored is not None:
            logprobs, tops = scored
            prompt = PromptLogprobs(logprobs, None if self.tops is None else tops)
        decoded = [DecodedSequence(**each) for each in sequences]
        return DecodeResult(decoded, DecodingStats(**stats), num_bytes, prompt)


class NativeDecoder:
    """See Decoder; the arguments are those of BatchedDecoder."""

    def __init__(
        self,
        target: Engine,
        draft: Engine | None,
        *,
        max_rows: int | None = None,
        shares_prefixes: bool = True,
        costs: Costs | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        if _native is None:
            raise DecodingError(f"loop is 'native', but {NOT_INSTALLED}; use 'auto' or 'python'")
        self._decoder = _native.Decoder(target, draft, max_rows, shares_prefixes, costs, clock)
        self._specs = target.spec, None if draft is None else draft.spec
        self._live: dict[Any, NativeRequest] = {}

    @property
    def num_live(self) -> int:
        return int(self._decoder.num_live)

    @property
    def num_used_rows(self) -> int:
        return int(self._decoder.num_used_rows)

    def accepts(self, request: DecodingRequest, others: Sequence[DecodingRequest]) -> bool:
        return True

    def join(self, request: DecodingRequest) -> NativeRequest:
        """See Decoder.join; DecodingError: only the numpy loop decodes this request."""
        if (reason := obstacle(request)) is not None:
            raise DecodingError(
                f"loop is 'native', but {reason}, which only the loop in Python does; use 'auto'"
            )
        check_decodable(request, *self._specs)
        estimator, pool = _estimator_of(request.estimator), _pool_of(request.ngram_pool)
        options = _options_json(request.config)
        live = NativeRequest(self._decoder.join(request, options, estimator, pool), request)
        self._live[live.handle] = live
        return live

    def iterate(self) -> Sequence[Progress]:
        progress = []
        for handle, event in self._decoder.iterate():
            live = self._live[handle]
            progress.append(Progress(live, live.event(event)))
            if isinstance(event, tuple | BaseException):
                del self._live[handle]
        return progress

    def preempt(self, live: LiveRequest) -> None:
        self._decoder.preempt(_native_of(live))

    def resume(self, live: LiveRequest) -> None:
        self._decoder.resume(_native_of(live))

    def leave(self, live: LiveRequest) -> None:
        handle = _native_of(live)
        self._decoder.leave(handle)
        self._live.pop(handle, None)

    def keep_for(self, request: DecodingRequest | None) -> None:
        identity = request and request.reusable_prompt("draft")
        self._decoder.keep_for(identity.tokens if identity else [], identity and identity.source)

    def forget(self) -> None:
        self._decoder.forget()


class EitherDecoder:
    """Decodes requests by the core if it can, else in numpy, never both at once.

    Cache rows that requests of one loop leave cannot be reused by the other.
    """

    def __init__(self, target: Engine, draft: Engine | None, **options: Any) -> None:
        """Take what BatchedDecoder takes."""
        self._in_numpy = BatchedDecoder(target, draft, **options)
        self._native = NativeDecoder(target, draft, **options)
        self._current: Decoder = self._native

    def _decoder_of(self, request: DecodingRequest) -> Decoder:
        return self._in_numpy if obstacle(request) else self._native

    @property
    def num_live(self) -> int:
        return self._current.num_live

    @property
    def num_used_rows(self) -> int:
        return self._current.num_used_rows

    def accepts(self, request: DecodingRequest, others: Sequence[DecodingRequest]) -> bool:
        wanted = self._decoder_of(request)
        return all(self._decoder_of(other) is wanted for other in others)

    def _use(self, decoder: Decoder) -> None:
        if decoder is not self._current:
            self._current.keep_for(None)
            self._current = decoder

    def join(self, request: DecodingRequest) -> LiveRequest:
        self._use(self._decoder_of(request))
        return self._current.join(request)

    def iterate(self) -> Sequence[Progress]:
        return self._current.iterate()

    def preempt(self, live: LiveRequest) -> None:
        self._current.preempt(live)

    def resume(self, live: LiveRequest) -> None:
        self._use(self._native if isinstance(live, NativeRequest) else self._in_numpy)
        self._current.resume(live)

    def leave(self, live: LiveRequest) -> None:
        (self._native if isinstance(live, NativeRequest) else self._in_numpy).leave(live)

    def keep_for(self, request: DecodingRequest | None) -> None:
        if request is not None:
            self._use(self._decoder_of(request))
        self._current.keep_for(request)

    def forget(self) -> None:
        self._current.forget()


def new_decoder(target: Engine, draft: Engine | None, loop: Loop, **options: Any) -> Decoder:
    """Return the decoder for a choice of loop; ``options`` are the keywords of BatchedDecoder.

    DecodingError: the loop is "native", and it is not installed.
    """
    if loop == "native":
        return NativeDecoder(target, draft, **options)
    if loop == "auto" and is_installed():
        return EitherDecoder(target, draft, **options)
    return BatchedDecoder(target, draft, **options)


def _native_of(live: LiveRequest) -> Any:
    assert isinstance(live, NativeRequest)
    return live.handle


def _estimator_of(estimator: AcceptanceEstimator) -> Any:
    if estimator not in _estimators:
        _estimators[estimator] = _native.AcceptanceEstimator(estimator.agreement_of_pair)
    return _estimators[estimator]


def _pool_of(pool: NGramPool | None) -> Any:
    if pool is not None and pool not in _pools:
        _pools[pool] = _native.NGramPool(pool.max_tokens)
    return None if pool is None else _pools[pool]


def _options_json(config: DecodingConfig) -> str:
    names = {field.name for field in dataclasses.fields(config)} - _NOT_READ
    given = {name: getattr(config, name) for name in names}
    given["logit_bias"] = [*dict(config.logit_bias).items()]
    return json.dumps(given)
