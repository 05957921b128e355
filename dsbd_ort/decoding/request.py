"""A decoding request, its results, and the checks before any work: prompt, models, rows needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Source
from dsbd_forward.spec import EngineSpec
from dsbd_ort.decoding.beams import Agreement, Hypotheses, Hypothesis
from dsbd_ort.decoding.cache_view import RowIdentity
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import Costs
from dsbd_ort.decoding.drafting.draft import MOST_FORCED_LAYERS
from dsbd_ort.decoding.drafting.ngram import NGramPool
from dsbd_ort.decoding.engine_call import Clock, EngineCall, Role
from dsbd_ort.decoding.errors import DecodingError
from dsbd_ort.decoding.logits_processing.allowed_mass import AllowedMass
from dsbd_ort.decoding.logits_processing.constraint import Constraint
from dsbd_ort.decoding.logits_processing.path_states import StopState, state_after
from dsbd_ort.decoding.option_values import shown
from dsbd_ort.decoding.rejection_coupling import RandomSource
from dsbd_ort.decoding.rule import Finished
from dsbd_ort.decoding.stats import DecodingStats, StatsRecorder
from dsbd_ort.decoding.top_tokens import PromptLogprobs, TokenLogprobs, TopTokens
from dsbd_ort.decoding.trace import TraceRecorder


def _one() -> int:
    return 1


GIVE_UP_INTERVAL = 16

Preempts = Callable[[EngineCall], bool]

GivesUp = Callable[[list[list[int]], list["DecodedSequence"]], bool]
"""Receives the new tokens of each beam that goes on, and the sequences that have ended."""


@dataclass(frozen=True, kw_only=True)
class DecodingRequest:
    """A prompt and everything else, the models aside, that its continuation depends on.

    Attributes:
        prompt_ids: at least one token id.
        config: the options, settled. ``eos_token_id`` None means that nothing ends a sequence.
        rng: its first 63-bit draw is the noise key; only the rejection coupling draws more.
        stop: the state of the empty continuation, which finds the request's ``stop_strings``. A
            beam ends with the token that makes its state end.
        constraint: the running one of ``config.constraint`` where that is only a specification.
        random_source: the randomness of the rejection coupling, instead of ``rng``.
        clock: seconds, for the statistics.
        costs: of both engines' calls; draft_policy "throughput" requires them, None stands for it
            where they are given.
        estimator: of earlier requests with the same widths, for the same policy; is updated.
        ngram_pool: texts of earlier requests, for the n-gram drafter; is given this one's.
        trace: receives every iteration.
        num_sharers: returns how many requests share the engine calls now, for the same policy.
        source: what its rows depend on besides the tokens.
        copied_ids: tokens that the output may repeat, as those of a source: the n-gram drafter
            reads them before the prompt.
        allowed_mass: is told what processors leave of the target's distributions; None: nothing is.
        preempts: returns whether the rows of the request are dropped before this engine call, to be
            computed again (see ``preemption``), although nobody needs the room: for tests of that.
            Of requests that run together the youngest alone is asked. None: only for room.
        gives_up: returns whether the request ends here, with what it has: whatever follows, its
            caller has no use for it. Called every ``GIVE_UP_INTERVAL`` tokens. None: never.
    """

    prompt_ids: Sequence[int]
    config: DecodingConfig
    rng: np.random.Generator
    stop: StopState | None = None
    constraint: Constraint | None = None
    random_source: RandomSource | None = None
    clock: Clock = time.perf_counter
    costs: Costs | None = None
    estimator: AcceptanceEstimator | None = None
    ngram_pool: NGramPool | None = None
    trace: TraceRecorder | None = None
    num_sharers: Callable[[], int] = _one
    source: Source = None
    copied_ids: Sequence[int] = ()
    allowed_mass: AllowedMass | None = None
    preempts: Preempts | None = None
    gives_up: GivesUp | None = None

    @property
    def running_constraint(self) -> Constraint | None:
        """The constraint that says which tokens may follow, None without one."""
        return self.config.constraint if self.constraint is None else self.constraint

    def __post_init__(self) -> None:
        settled = self.config.settled(costs_are_known=self.costs is not None)
        object.__setattr__(self, "config", settled)

    @property
    def identity(self) -> RowIdentity:
        """What the rows of the prompt are a function of."""
        return RowIdentity(list(self.prompt_ids), self.source)

    @property
    def source_ids(self) -> Sequence[int] | None:
        """The tokens of the source, None without one.

        Raises:
            DecodingError: an option counts them, and the source has none.
        """
        if self.source is None or not self.config.encoder_no_repeat_ngram_size:
            return None
        if not isinstance(self.source, tuple) or not all(type(t) is int for t in self.source):
            raise DecodingError(
                f"encoder_no_repeat_ngram_size is {self.config.encoder_no_repeat_ngram_size}, but "
                "the source of the request is no tuple of tokens; leave the option out"
            )
        return self.source

    def reusable_prompt(self, role: Role) -> RowIdentity:
        """Return the part of the prompt whose rows may be there already.

        None of the target's where the prompt's log-probabilities are wanted: a row that was
        computed for another request has no logits any more.
        """
        if role == "target" and self.config.prompt_logprobs:
            return RowIdentity([], self.source)
        return RowIdentity(list(self.prompt_ids[:-1]), self.source)


@dataclass(frozen=True, kw_only=True)
class DecodedSequence:
    """One returned sequence.

    Attributes:
        token_ids: the new tokens, those included that end the sequence.
        token_logprobs: raw log-probability of every new token under the target.
        logprob: their sum.
        score: logprob / num_new_tokens ** length_penalty, the ranking.
        finish_reason: "eos", "stop" (a stop string) or "length".
        top_logprobs: the most probable tokens in the place of every new token, with
            ``top_logprobs`` in the request.
    """

    token_ids: list[int]
    token_logprobs: list[float]
    logprob: float
    score: float
    finish_reason: str
    top_logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class DecodeResult:
    """The sequences, best first, and the statistics of a request.

    Attributes:
        distribution_bytes_peak: most bytes that the distributions of nodes took, of both engines.
        prompt_logprobs: with ``prompt_logprobs`` in the request.
    """

    sequences: list[DecodedSequence]
    stats: DecodingStats
    distribution_bytes_peak: int = 0
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True)
class IterationOutput:
    """The live hypotheses after one iteration of the loop; read outputs in their order."""

    all_hypotheses: Hypotheses
    live: NDArray[np.int64]
    agreement: Agreement
    recorder: StatsRecorder
    tops: TopTokens

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The live hypotheses."""
        return [Hypothesis(self.all_hypotheses, entry) for entry in self.live.tolist()]

    @cached_property
    def agreed_tokens(self) -> list[int]:
        """New tokens, from the first on, that all live hypotheses share: they are final."""
        self.agreement.update(self.live)
        return self.agreement.tokens.copy()

    def stats(self) -> DecodingStats:
        """Return the statistics so far, of the agreed tokens."""
        return self.recorder.stats(len(self.agreed_tokens))

    def agreed_logprobs(self, start: int) -> list[float]:
        """Return the raw log-probabilities of the agreed tokens from number ``start`` on."""
        entries = self.agreement.entries[start : len(self.agreed_tokens)]
        logprobs: list[float] = self.all_hypotheses.token_logprobs[entries].tolist()
        return logprobs

    def agreed_top_logprobs(self, start: int) -> list[TokenLogprobs] | None:
        """Return the most probable tokens in the places of the agreed ones from ``start`` on."""
        entries = self.agreement.entries[start : len(self.agreed_tokens)]
        return self.tops.of(np.array(entries, dtype=np.int64))


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class WithResult(Generic[_Item, _Result]):
    """Iterates over a generator and keeps its return value.

    Attributes:
        result: the return value, once the iteration has ended.
    """

    result: _Result

    def __init__(self, generator: Generator[_Item, None, _Result]) -> None:
        self._generator = generator

    def __iter__(self) -> Iterator[_Item]:
        self.result = yield from self._generator


def result_of(generator: Generator[object, None, _Result]) -> _Result:
    """Run a generator to its end and return its return value."""
    items = WithResult(generator)
    for _ in items:
        pass
    return items.result


def decoded_sequences(
    finished: Finished,
    hypotheses: Hypotheses,
    request: DecodingRequest,
    tops: TopTokens,
) -> list[DecodedSequence]:
    """Return final hypotheses as sequences."""
    sequences = []
    paths, logprobs = (
        hypotheses.paths(finished.hypotheses),
        hypotheses.logprobs[finished.hypotheses],
    )
    for path, logprob, score in zip(
        paths, logprobs.tolist(), finished.scores.tolist(), strict=True
    ):
        token_ids = hypotheses.tokens[path].tolist()
        sequences.append(
            DecodedSequence(
                token_ids=token_ids,
                token_logprobs=hypotheses.token_logprobs[path].tolist(),
                logprob=logprob,
                score=score,
                finish_reason=_finish_reason(token_ids, request),
                top_logprobs=tops.of(path),
            )
        )
    return sequences


def _finish_reason(token_ids: list[int], request: DecodingRequest) -> str:
    if token_ids[-1] in request.config.eos_ids:
        return "eos"
    searched = token_ids[request.config.min_new_tokens :]
    if request.stop and state_after(request.stop, searched).has_ended:
        return "stop"
    if (constraint := request.running_constraint) is not None:
        states = constraint.start(request.prompt_ids)
        for token in token_ids:
            states = constraint.advance(states, np.array([token]))
        if constraint.has_ended(states)[0]:
            return "stop"
    return "length"


def check_request(request: DecodingRequest, target: EngineSpec, draft: EngineSpec | None) -> None:
    """Raise DecodingError for a prompt, models or a missing stop state that cannot be decoded."""
    config = request.config
    check_prompt(request.prompt_ids, target.vocab_size)
    if config.stop_texts and request.stop is None:
        raise DecodingError(
            f"stop_strings is {shown(config.stop_texts)}, but decoding sees tokens, not text; give "
            "decode a stop state as well, or use Pipeline"
        )
    if request.running_constraint is not None and not hasattr(request.running_constraint, "start"):
        raise DecodingError(
            f"constraint is {shown(config.constraint)}, which requires a tokenizer; bind it to "
            "one, or use Pipeline"
        )
    highest_eos = max(config.eos_ids, default=0)
    if highest_eos >= target.vocab_size:
        raise DecodingError(
            f"eos_token_id has {highest_eos}; expected 0 to {target.vocab_size - 1}, the target's "
            "vocabulary"
        )
    _check_token_ids(config, target.vocab_size)
    if target.reads_source and request.source is None:
        raise DecodingError(
            "source is None, but the target is an encoder-decoder's, whose rows depend on one; "
            "give the request the token ids of its source as a tuple"
        )
    if not config.has_draft_model:
        return
    if draft is None:
        raise DecodingError(
            f"draft is None, but strategy {config.strategy} drafts by a model; give a draft model, "
            "drafter 'ngram', or a strategy without a draft such as beam-sample"
        )
    if draft.vocab_size != target.vocab_size:
        raise DecodingError(
            f"draft has {draft.vocab_size} tokens, target {target.vocab_size}; use a pair that "
            "shares its vocabulary"
        )
    if draft.reads_source and not target.reads_source:
        raise DecodingError(
            "the draft is an encoder-decoder's and reads a source, which requests to this target "
            "do not have; use a pair that both read one"
        )
    if draft.reads_features and not target.returns_features:
        raise DecodingError(
            "the draft reads features of its target, but the target returns none; use the target "
            "of the same bundle, exported with --features"
        )


def _check_token_ids(config: DecodingConfig, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary in the options of processors."""
    ids_by_field = {
        "logit_bias": [token for token, _ in config.biases],
        "bad_words_ids": [token for word in config.bad_sequences for token in word],
        "suppress_tokens": config.suppressed_ids,
        "begin_suppress_tokens": config.suppressed_first_ids,
        "no_timestamps_token_id": [config.no_timestamps_token_id or 0],
        "last_timestamp_token_id": [config.last_timestamp_token_id or 0],
        "forced_bos_token_id": [config.forced_bos_token_id or 0],
        "forced_eos_token_id": [config.forced_eos_token_id or 0],
    }
    for name, ids in ids_by_field.items():
        if (highest := max(ids, default=0)) >= vocab_size:
            raise DecodingError(
                f"{name} has token id {highest}; expected 0 to {vocab_size - 1}, the target's "
                "vocabulary"
            )


def check_prompt(prompt_ids: Sequence[int], vocab_size: int, what: str = "prompt") -> None:
    """Raise DecodingError for a prompt that is not token ids of the target.

    what: "source" for that of an encoder-decoder, whose encoder has ``vocab_size`` tokens.
    """
    if not isinstance(prompt_ids, Sequence | np.ndarray):
        raise DecodingError(
            f"the {what} is a {type(prompt_ids).__name__}; expected a sequence of token ids"
        )
    if not len(prompt_ids):
        raise DecodingError(f"the {what} has no token; give at least one")
    for token_id in prompt_ids:
        if isinstance(token_id, bool | np.bool_) or not isinstance(token_id, int | np.integer):
            raise DecodingError(
                f"the {what} has a {type(token_id).__name__} among its token ids; expected whole "
                "numbers"
            )
    lowest, highest = min(prompt_ids), max(prompt_ids)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise DecodingError(
            f"the {what} has token id {shown(int(wrong))}; expected 0 to {vocab_size - 1}, the "
            f"vocabulary of the {'target' if what == 'prompt' else 'encoder'}"
        )


def most_draft_nodes(config: DecodingConfig) -> int:
    """Return how many nodes one draft may add.

    No layer is drafted in the place of the last token. Forced layers, which a constraint may add
    or put in the place of others, are as wide as any.
    """
    most_layers = config.max_new_tokens - 1
    if not config.drafts or config.constraint is None:
        return sum(config.layer_widths[:most_layers])
    num_layers = min(most_layers, len(config.layer_widths) + MOST_FORCED_LAYERS)
    return num_layers * max(config.width, config.most_draft_beams)


def most_descendants(config: DecodingConfig) -> int:
    """Return how many nodes below the beams pruning may leave.

    Two drafts' worth, the oldest first, so that the rows of a request have a bound. A node that is
    left out and selected after all is computed again.
    """
    return 2 * most_draft_nodes(config)


def most_rows(
    num_prompt_tokens: int, config: DecodingConfig, *, has_top_k_head: bool = True
) -> int:
    """Return a bound of the rows that a request ever holds in the cache of one engine.

    has_top_k_head: of the target, which may have to compute a node again.

    The paths of the beams take at most ``num_beams`` rows a token (where beams share no token).
    Added are the nodes that pruning leaves, and the rows of one iteration: a draft, and the
    selected nodes of every layer. Rows that are not used any more give way where there is no room.
    """
    num_beams = max(config.width, config.joint_beams or 1)
    num_forced = MOST_FORCED_LAYERS if config.drafts and config.constraint is not None else 0
    num_layers = min(len(config.layer_widths) + num_forced + 1, config.max_new_tokens)
    on_paths = num_beams * (config.max_new_tokens + 1)
    left = num_beams + most_descendants(config)
    added = most_draft_nodes(config) + (num_layers + 1) * num_beams
    if config.processes_logits:
        added *= 2 if has_top_k_head else 1  # see ForestRunner.compute
    elif config.row.rule == "search":  # see ForestRunner.complete
        added += num_beams
    return num_prompt_tokens + on_paths + left + added


_MOST_EXPECTED_TOKENS = 1024


def expected_rows(num_prompt_tokens: int, config: DecodingConfig) -> int:
    """Return the rows that a request usually comes to hold, if it runs to its end.

    Its beams share most tokens, and the rest of two drafts lies between. A very long answer is
    expected to end sooner: attention reads all rows for which there is room.
    """
    num_tokens = num_prompt_tokens + min(config.max_new_tokens, _MOST_EXPECTED_TOKENS)
    return min(num_tokens + most_descendants(config), most_rows(num_prompt_tokens, config))


def most_new_tokens(
    num_prompt_tokens: int, config: DecodingConfig, max_rows: int, *, has_top_k_head: bool = True
) -> int:
    """Return the ``max_new_tokens`` with which ``most_rows`` is at most ``max_rows``."""
    num_beams = max(config.width, config.joint_beams or 1)
    bound = most_rows(num_prompt_tokens, config, has_top_k_head=has_top_k_head)
    num_left = max_rows - bound
    return config.max_new_tokens + num_left // num_beams
