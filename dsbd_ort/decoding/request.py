"""A decoding request, and the checks before any work: its prompt and options, the models."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dsbd_forward.forward import Source
from dsbd_forward.spec import EngineSpec
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import Costs
from dsbd_ort.decoding.drafting.draft_context import reads_whole_path
from dsbd_ort.decoding.drafting.ngram import NGramPool
from dsbd_ort.decoding.engine_call import Clock, EngineCall, Role
from dsbd_ort.decoding.errors import DecodingError
from dsbd_ort.decoding.kv_cache import RowIdentity
from dsbd_ort.decoding.logits_processing.allowed_after import AllowedMass
from dsbd_ort.decoding.logits_processing.constraint import Constraint
from dsbd_ort.decoding.logits_processing.path_states import StopState
from dsbd_ort.decoding.option_values import shown
from dsbd_ort.decoding.rejection_coupling import RandomSource
from dsbd_ort.decoding.result import DecodedSequence
from dsbd_ort.decoding.trace import TraceRecorder

GIVE_UP_INTERVAL = 16

Preempts = Callable[[EngineCall], bool]

CopiedIds = Sequence[int] | Callable[[], Sequence[int]]
GivesUp = Callable[[list[list[int]], list[DecodedSequence]], bool]
"""Receives the new tokens of each live beam, and the sequences that have ended."""


@dataclass(frozen=True, kw_only=True)
class DecodingRequest:
    """A prompt and everything else, the models aside, that its continuation depends on.

    Attributes:
        prompt_ids: at least one token id.
        config: the options, settled. ``eos_token_id`` None means that nothing ends a sequence.
        rng: its first 63-bit draw is the noise key; only the rejection coupling draws more.
        stop: the state of the empty continuation, which finds the request's ``stop_strings``. A
            beam ends with the token that makes its state end.
        constraint: the running constraint, if ``config.constraint`` is only a specification.
        random_source: the randomness of the rejection coupling, instead of ``rng``.
        clock: seconds, for the statistics.
        costs: of both engines' calls; draft_policy "throughput" needs them, and is the default if
            they are given.
        estimator: of earlier requests with the same widths, for the same policy; is updated.
        ngram_pool: texts of earlier requests, for the n-gram drafter; this text is added.
        trace: receives every iteration.
        num_sharers: returns how many requests share the engine calls now, for the same policy.
        source: see ``Forward.source``.
        begin_token: the token that begins every text of the models, if the prompt begins with it; a
            draft that reads only the end of the prompt reads it first.
        copied_ids: tokens that the output may repeat, as those of a source or a predicted text,
            for the n-gram drafter; if ``config.predicted_token_ids`` is given, those. A function
            returns them once they are known, before that none.
        allowed_mass: records how much of the target's distributions processors leave; None: off.
        preempts: for tests: returns whether the request's rows are dropped before this engine call
            and computed again; of several requests the youngest is asked. None: only for room.
        gives_up: returns whether the request ends here, because its caller has no use for the rest.
            Called every ``GIVE_UP_INTERVAL`` tokens. None: never.
    """

    prompt_ids: Sequence[int]
    config: DecodingConfig
    rng: np.random.Generator
    stop: StopState | None = None
    constraint: Constraint | None = None
    random_source: RandomSource | None = None
    clock: Clock = time.perf_counter
    costs: Costs | None = None
    estimator: AcceptanceEstimator = field(default_factory=AcceptanceEstimator)
    ngram_pool: NGramPool | None = None
    trace: TraceRecorder | None = None
    num_sharers: Callable[[], int] = lambda: 1
    source: Source = None
    begin_token: int | None = None
    copied_ids: CopiedIds = ()
    allowed_mass: AllowedMass | None = None
    preempts: Preempts | None = None
    gives_up: GivesUp | None = None

    @property
    def running_constraint(self) -> Constraint | None:
        return self.config.constraint if self.constraint is None else self.constraint

    def __post_init__(self) -> None:
        settled = self.config.settled(costs_are_known=self.costs is not None)
        vars(self)["config"] = settled  # frozen
        if settled.predicted_token_ids:
            vars(self)["copied_ids"] = settled.predicted_token_ids

    @property
    def identity(self) -> RowIdentity:
        return RowIdentity(list(self.prompt_ids), self.source)

    @property
    def source_ids(self) -> Sequence[int] | None:
        """The tokens of the source, if an option needs them; DecodingError: it has none."""
        if self.source is None or not self.config.encoder_no_repeat_ngram_size:
            return None
        if not isinstance(self.source, tuple) or not all(type(t) is int for t in self.source):
            raise DecodingError(
                f"encoder_no_repeat_ngram_size is {self.config.encoder_no_repeat_ngram_size}, but "
                "the source of the request is not a tuple of tokens; leave the option out"
            )
        return self.source

    def reusable_prompt(self, role: Role) -> RowIdentity:
        """Return the part of the prompt whose rows may be reused.

        With ``prompt_logprobs`` none of the target's: such rows have no logits any more.
        """
        if role == "target" and self.config.prompt_logprobs:
            return RowIdentity([], self.source)
        return RowIdentity(list(self.prompt_ids[:-1]), self.source)

    def chooses_start(self, role: Role, spec: EngineSpec) -> bool:
        """Return whether an engine's path begins where ``DraftContext`` says, not at the prompt."""
        return role == "draft" and not reads_whole_path(spec, self.source)

    def finish_reason(self, token_ids: list[int]) -> str:
        """Return why a sequence of these new tokens has ended, see DecodedSequence."""
        if token_ids[-1] in self.config.eos_ids:
            return "eos"
        if (stop := self.stop) is not None:
            for token in token_ids[self.config.min_new_tokens :]:
                stop = stop.extended(token)
            if stop.has_ended:
                return "stop"
        if (constraint := self.running_constraint) is not None:
            states = constraint.start(self.prompt_ids)
            for token in token_ids:
                states = constraint.advance(states, np.array([token]))
            if constraint.has_ended(states)[0]:
                return "stop"
        return "length"


def check_request(request: DecodingRequest, target: EngineSpec, draft: EngineSpec | None) -> None:
    """Raise DecodingError for a prompt, models or a missing stop state that cannot be decoded."""
    config = request.config
    check_prompt(request.prompt_ids, target.vocab_size)
    if config.stop_strings and request.stop is None:
        raise DecodingError(
            f"stop_strings is {shown(config.stop_strings)}, but decoding sees tokens, not text; "
            "give decode a stop state as well, or use Pipeline"
        )
    if config.predicted_text:
        raise DecodingError(
            f"predicted_text is {shown(config.predicted_text)}, but decoding sees tokens, not "
            "text; give predicted_token_ids, or use Pipeline"
        )
    constraint = (
        [("constraint is", request.running_constraint)] if request.running_constraint else []
    )
    for name, value in [*constraint, *(("scorers has", each) for each in config.scorers)]:
        if not hasattr(value, "start"):
            raise DecodingError(
                f"{name} {shown(value)}, which requires a tokenizer; bind it to one, or use "
                "Pipeline"
            )
    highest_eos = max(config.eos_ids, default=0)
    if highest_eos >= target.vocab_size:
        raise DecodingError(
            f"eos_token_id has {highest_eos}; expected 0 to {target.vocab_size - 1}, the target's "
            "vocabulary"
        )
    check_token_ids(config, target.vocab_size)
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


def check_token_ids(config: DecodingConfig, vocab_size: int) -> None:
    """Raise DecodingError for an option with a token that is not below ``vocab_size``."""
    ids_by_field = {
        "logit_bias": [token for token, _ in config.logit_bias],
        "predicted_token_ids": config.predicted_token_ids,
        "bad_words_ids": [token for word in config.bad_words_ids for token in word],
        "suppress_tokens": config.suppress_tokens,
        "begin_suppress_tokens": config.begin_suppress_tokens,
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
    """Raise DecodingError for a prompt, or a source, that is not token ids below ``vocab_size``."""
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
