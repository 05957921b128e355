"""The target and draft of a pipeline: their use, and what they keep between requests.

Acceptance estimators for draft_policy "throughput", texts for the n-gram drafter.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from dsbd_errors import DsbdError
from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import LearnedCosts, learn_from_first_calls
from dsbd_ort.decoding.option_table import OPTION_TABLE
from dsbd_ort.pipeline_options import PipelineOptions
from dsbd_runtime.bundle_files.bundle import Bundle, ModelEntry
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.errors import CapacityError, InputError
from dsbd_runtime.loading import load_causal_lm, load_pair

T = TypeVar("T")

MOST_ESTIMATORS = 64
"""Settings (strategy, width, warping) for which draft_policy "throughput" stores how often drafts
were accepted; the least recently used are dropped, and learned anew."""
MOST_CALLERS = 64
"""Callers whose texts are kept for the n-gram drafter; the least recent one is dropped."""


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


class Recent(Generic[T]):
    """Objects of the ``most`` latest used keys, made when they are missing; thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def keys(self) -> list[Hashable]:
        """The keys that have an object, the latest used last."""
        return list(self._found)

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        with self._lock:
            found = self._found[key] = self._found.pop(key, None) or make()
            if len(self._found) > self._most:
                self._found.popitem(last=False)
            return found


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


def check_drafter(config: DecodingConfig, *, has_draft: bool) -> None:
    """Raise InputError for a request that needs a draft model if the bundle has no draft."""
    if has_draft or not config.has_draft_model:
        return
    fix = "or add a draft with: dsbd-export --bundle BUNDLE --draft DRAFT"
    if OPTION_TABLE["drafter"].unmet(config) is None:
        raise InputError(
            f"drafter is {config.drafter!r}, but the bundle has no draft: expected 'ngram' or "
            f"'none'; {fix}"
        )
    raise InputError(
        f"strategy is {config.strategy!r}, which needs a draft model, but the bundle has no draft; "
        f"use another strategy, {fix}"
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
    """Return the costs of a pair, which requests refine; drafts of no text are not called."""
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
