"""The options of a request, resolved and checked at construction."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from dsbd_ort.decoding.errors import ConfigError
from dsbd_ort.decoding.option_table import (
    MOST_NODES,
    OPTION_TABLE,
    read_option,
    resolved_option,
)
from dsbd_ort.decoding.option_values import did_you_mean, shown
from dsbd_ort.decoding.strategies import STRATEGIES, Strategy


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """The options of one request, resolved at construction by the table of options.

    Numbers may be of any exact type, numpy's too; plain Python values are stored. An option that
    means nothing to the strategy or to another option is refused unless its value is neutral, and
    then is stored as None or as the neutral value.

    Attributes:
        strategy: a key of ``STRATEGIES``. Default "dsbd"; at temperature 0 its deterministic
            counterpart, speculative-beam-search.
        num_beams: W, beams of the output. Default 4, or 1 for single-beam strategies.
        coupling: how draft and target draws are coupled: "gumbel" (default; the output does not
            depend on the draft) or "rejection" (the paper's). Sampling strategies only.
        width_policy: "fixed" (default) keeps W beams in every layer, which is beam sampling's exact
            law; "threshold" (the paper's dynamic width) keeps as many as are likely to be accepted.
            ``min_beams`` or another ``accept_threshold`` than 0.7 chooses "threshold" as well.
        min_beams: fewest beams that "threshold" keeps. Default half of ``num_beams``; None where
            the width is fixed or nothing is drafted.
        accept_threshold: probability with which "threshold" wants a layer accepted.
        drafter: what proposes: "model", the draft model; "ngram", what followed the last tokens
            before in the prompt, the output and earlier requests, which needs no model; both, where
            the n-grams speak for long repetitions alone; or "none". Default "model" where there is
            one, else "ngram"; None before that is known, see ``settled``. A token that a constraint
            forces is drafted without either.
        draft_policy: "fixed" drafts ``draft_length`` layers of ``draft_beams`` candidates;
            "throughput" as much as is expected to pay, with both numbers as upper limits. It
            needs an output that does not depend on the draft: gumbel coupling or search, fixed
            width, memory "forest", no replacement. Default "fixed" where that is not given, or
            one of both numbers is; else None, and ``settled`` says what it stands for.
        draft_length: gamma, layers of a drafted forest. Default 4 (a limit of 8 for
            "throughput"), or 0 without a draft; None while ``draft_policy`` is.
        draft_beams: W_S, candidates of a drafted layer: one number or one per layer. Default
            ``num_beams``; 4 for single-beam strategies that draft a tree; four times as many as
            a limit for "throughput". Resolved to one per layer; None while ``draft_policy`` is.
        memory: "forest" goes on with all beams; "single" (the paper's memory reduction) with the
            one of highest log-probability per token after each iteration.
        replacement: draw beams i.i.d. (the paper's theorem) instead of distinct ones. Sampling
            strategies with several beams, or a draft of several.
        temperature, top_k, top_p: warping of both models; top_k 0, read from -1 too, and top_p 1
            switch it off. Temperature 0 is for the search and joint strategies; with it a search
            takes any top_k and top_p, for its best token is in every set of them.
        min_p: tokens of less than this share of the most probable one's probability are cut.
        typical_p: the fewest tokens nearest to the entropy that reach this mass stay (locally
            typical sampling); 1 switches it off.
        repetition_penalty: divides positive scores of tokens in the prompt or output, multiplies
            negative ones; 1 switches it off.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens in the output,
            once and for each time.
        no_repeat_ngram_size: no n-gram of this size occurs twice in prompt and output; 0: off.
        encoder_no_repeat_ngram_size: no n-gram of this size of the source, or of the prompt where
            there is none, occurs in the output; 0: off.
        bad_words_ids: token sequences that never occur in the output.
        logit_bias: token ids and what is added to their logits.
        suppress_tokens: tokens that never occur in the output.
        begin_suppress_tokens: tokens that are not its first; not the one behind a forced first.
        no_timestamps_token_id: the token before the first of a speech model's times: the output
            has times by Whisper's rules. They come in pairs, but for the one at the start and one
            at the end, and never decrease; where the times together are more probable than the
            most probable token of a text, one of them follows.
        max_initial_timestamp_index: the last of the times that an output may begin with; None: any.
        last_timestamp_token_id: the last of the times; None: all tokens after the first are times.
        min_new_tokens: none of so many new tokens ends a sequence; stop strings are looked for
            behind them.
        forced_bos_token_id, forced_eos_token_id: the only token behind a prompt of one token, and
            as the last of ``max_new_tokens``.
        constraint: which tokens may follow (``dsbd_ort.constraints``).
        logits_processors: functions (path, scores) -> scores of the caller's, in this order, behind
            those above; path: the prompt and the new tokens, (num_tokens,) int64; scores:
            (vocab_size,) float64.
        max_new_tokens: longest continuation, the end-of-sequence token included.
        seed: of the request. None: the pipeline draws one and reports it with the result.
            ``decode`` takes a generator instead.
        num_return_sequences: how many of the final beams to return, best first.
        length_penalty: sequences are ranked by logprob / num_new_tokens ** length_penalty.
        early_stopping: of strategies with beams, when a request may end before all its beams have,
            as in transformers: True, as soon as ``num_return_sequences`` (in a search
            ``num_beams``) sequences have ended; False, when no live beam scores more than these as
            it is; "never", when none can score more in ``max_new_tokens``.
        joint_threshold: of mjsd: joint likelihood ratio that accepted tokens must exceed.
            Default 0.1.
        joint_tokens, joint_beams: of mjgd: tokens decided jointly, beams that search them.
            Default 4 each.
        stop_strings: one text or several. A sequence whose text (special tokens left out) contains
            one ends there; its text is cut before it.
        eos_token_id: one id, several, or None for what the model says (none in ``decode``).
        top_logprobs: most probable tokens, by raw log-probability, to return with every new one.
        prompt_logprobs: also return the log-probabilities of the prompt's tokens, which are
            computed anew even where the target's cache holds them.
        skip_special_tokens: whether special tokens are left out of the text.
    """

    strategy: str | None = None
    num_beams: int | None = None
    coupling: Literal["gumbel", "rejection"] | None = None
    width_policy: Literal["fixed", "threshold"] | None = None
    min_beams: int | None = None
    accept_threshold: float = 0.7
    drafter: Literal["model", "ngram", "model+ngram", "none"] | None = None
    draft_policy: Literal["fixed", "throughput"] | None = None
    draft_length: int | None = None
    draft_beams: int | Sequence[int] | None = None
    memory: Literal["forest", "single"] = "forest"
    replacement: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    bad_words_ids: Sequence[int | Sequence[int]] = ()
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    suppress_tokens: Sequence[int] = ()
    begin_suppress_tokens: Sequence[int] = ()
    no_timestamps_token_id: int | None = None
    max_initial_timestamp_index: int | None = None
    last_timestamp_token_id: int | None = None
    min_new_tokens: int = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    constraint: Any = None
    logits_processors: Sequence[Any] = ()
    max_new_tokens: int = 64
    seed: int | None = None
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    joint_threshold: float | None = None
    joint_tokens: int | None = None
    joint_beams: int | None = None
    stop_strings: str | Sequence[str] | None = None
    eos_token_id: int | Sequence[int] | None = None
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in OPTION_TABLE:
            object.__setattr__(self, name, read_option(name, getattr(self, name)))
        self._resolve(OPTION_TABLE)

    def _resolve(self, names: Iterable[str]) -> None:
        """Resolve options that were read, in the order of the table; check them together."""
        for name in names:
            object.__setattr__(self, name, resolved_option(name, getattr(self, name), self))
        if isinstance(self.draft_beams, int):
            per_layer = (self.draft_beams,) * (self.draft_length or 0)
            object.__setattr__(self, "draft_beams", per_layer)
        _check_widths(self)
        _check_times(self)
        if self.draft_policy is not None:
            _check_draft_beams(self)
        if self.draft_policy == "throughput":
            _check_throughput(self)

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> DecodingConfig:
        """Build a config from keyword arguments; an unknown name is a ConfigError."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(options) - known, key=str):
            close = did_you_mean(unknown[0], known)
            expected = close or "; expected a field of DecodingConfig (docs/run.md lists them)"
            raise ConfigError(f"unknown option {shown(unknown[0])}{expected}")
        return cls(**options)

    def settled(self, *, costs_are_known: bool, has_draft: bool = True) -> DecodingConfig:
        """Return the config with its drafter and its draft policy decided.

        None stands for "model" where there is a draft, else for "ngram"; and for "throughput" where
        the costs of engine calls are known, else for "fixed". And ``max_new_tokens`` becomes the
        length of the constraint's longest path, where that is shorter: nothing else follows from
        it, but for a forced last token, and rows are reserved for as many.
        """
        decided: dict[str, Any] = {}
        if self.drafter is None:
            decided["drafter"] = "model" if has_draft else "ngram"
        if self.draft_policy is None:
            decided["draft_policy"] = "throughput" if costs_are_known else "fixed"
        longest = self.longest_path
        if longest is not None and longest < self.max_new_tokens:
            decided["max_new_tokens"] = longest
        config = self._with(decided)
        if "draft_policy" in decided:
            config._resolve(("draft_length", "draft_beams"))  # all that follows from it
        return config

    def varied(
        self,
        *,
        seed: int | None = None,
        max_new_tokens: int | None = None,
        eos_token_id: tuple[int, ...] | None = None,
        prompt_logprobs: bool | None = None,
    ) -> DecodingConfig:
        """Return the config with other values of options from which no other follows.

        So it need not be resolved and checked again. None leaves an option as it is.
        """
        given = {
            "seed": seed,
            "max_new_tokens": max_new_tokens,
            "eos_token_id": eos_token_id,
            "prompt_logprobs": prompt_logprobs,
        }
        return self._with({name: value for name, value in given.items() if value is not None})

    def _with(self, values: Mapping[str, Any]) -> DecodingConfig:
        """Return a copy with values in their plain form; itself without any."""
        if not values:
            return self
        config = copy.copy(self)  # frozen, and checked already
        for name, value in values.items():
            object.__setattr__(config, name, value)
        return config

    @property
    def longest_path(self) -> int | None:
        """Tokens after which a sequence has ended by the constraint; None where none is known."""
        most: int | None = getattr(self.constraint, "most_tokens", None)
        if most is None or self.forced_eos_token_id is not None:
            return None
        return max(most, self.min_new_tokens)

    @property
    def drafts(self) -> bool:
        """Whether anything proposes layers."""
        return self.row.has_draft and self.drafter != "none"

    @property
    def has_ngram_drafter(self) -> bool:
        """Whether n-grams propose layers, alone or before the model."""
        return self.drafter in ("ngram", "model+ngram")

    @property
    def has_draft_model(self) -> bool:
        """Whether a draft model proposes layers, alone or with others."""
        return self.row.has_draft and self.drafter in (None, "model", "model+ngram")

    @property
    def row(self) -> Strategy:
        """The strategy's row of the table."""
        assert self.strategy is not None  # resolved at construction
        return STRATEGIES[self.strategy]

    @property
    def width(self) -> int:
        """W, the resolved ``num_beams``."""
        assert self.num_beams is not None  # resolved at construction
        return self.num_beams

    @property
    def smallest_width(self) -> int:
        """Fewest beams that the width policy ever keeps."""
        return self.width if self.min_beams is None else self.min_beams

    @property
    def layer_widths(self) -> tuple[int, ...]:
        """W_S of every drafted layer, first to last; empty without a draft. Of a settled config."""
        assert isinstance(self.draft_beams, tuple)  # resolved with the draft policy
        return self.draft_beams

    @property
    def most_draft_beams(self) -> int:
        """Most candidates of any drafted layer, 0 without a draft."""
        return max(self.layer_widths, default=0)

    @property
    def joint_limit(self) -> float:
        """The resolved ``joint_threshold``, of mjsd."""
        assert self.joint_threshold is not None  # resolved at construction
        return self.joint_threshold

    @property
    def block_length(self) -> int:
        """The resolved ``joint_tokens``, of mjgd."""
        assert self.joint_tokens is not None  # resolved at construction
        return self.joint_tokens

    @property
    def search_width(self) -> int:
        """The resolved ``joint_beams``, of mjgd."""
        assert self.joint_beams is not None  # resolved at construction
        return self.joint_beams

    @property
    def logits_options(self) -> list[str]:
        """The options given that are processors or a constraint."""
        return [name for name, off in _NEUTRAL_LOGITS_OPTIONS.items() if getattr(self, name) != off]

    @property
    def processes_logits(self) -> bool:
        """Whether a processor or a constraint changes what may be drawn."""
        return bool(self.logits_options)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The resolved ``logit_bias``."""
        assert isinstance(self.logit_bias, tuple)  # resolved at construction
        return self.logit_bias

    @property
    def bad_sequences(self) -> tuple[tuple[int, ...], ...]:
        """The resolved ``bad_words_ids``."""
        return self.bad_words_ids  # type: ignore[return-value]  # resolved at construction

    @property
    def suppressed_ids(self) -> tuple[int, ...]:
        """The resolved ``suppress_tokens``."""
        return _as_tuple(self.suppress_tokens)

    @property
    def suppressed_first_ids(self) -> tuple[int, ...]:
        """The resolved ``begin_suppress_tokens``."""
        return _as_tuple(self.begin_suppress_tokens)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The end-of-sequence ids, as a set."""
        if isinstance(self.eos_token_id, int):
            return frozenset((self.eos_token_id,))
        return frozenset(self.eos_token_id or ())

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop strings, as a tuple."""
        if isinstance(self.stop_strings, str):
            return (self.stop_strings,)
        return tuple(self.stop_strings or ())


def _as_tuple(tokens: int | Sequence[int]) -> tuple[int, ...]:
    return (tokens,) if isinstance(tokens, int) else tuple(tokens)


_NEUTRAL_LOGITS_OPTIONS: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": (),
    "logit_bias": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "no_timestamps_token_id": None,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "constraint": None,
    "logits_processors": (),
}


def _check_widths(config: DecodingConfig) -> None:
    """Refuse widths that contradict each other, and a rule that cannot draw."""
    if config.row.rule == "sample" and config.temperature == 0.0:
        raise ConfigError(
            f"temperature is 0, but strategy {config.strategy} samples; use more than 0, leave "
            f"strategy out, or use its counterpart {config.row.at_zero}"
        )
    if config.smallest_width > config.width:
        raise ConfigError(
            f"min_beams is {config.min_beams}, more than num_beams {config.width}; lower it"
        )
    if config.num_return_sequences > config.smallest_width:
        raise ConfigError(
            f"num_return_sequences is {config.num_return_sequences}, but as few as "
            f"{config.smallest_width} beams may be kept; lower it, or raise num_beams or min_beams"
        )
    if config.memory == "single" and config.num_return_sequences > 1:
        raise ConfigError(
            f"num_return_sequences is {config.num_return_sequences}, but memory 'single' ends "
            "with one beam; use 1 or memory 'forest'"
        )


def _check_times(config: DecodingConfig) -> None:
    """Refuse rules of times without a time, and with a constraint, which hides some tokens."""
    last = config.last_timestamp_token_id
    if last is not None and last <= (config.no_timestamps_token_id or 0):
        raise ConfigError(
            f"last_timestamp_token_id is {last}, expected a token after no_timestamps_token_id "
            f"{config.no_timestamps_token_id}; leave it out if all tokens after that are times"
        )
    if config.no_timestamps_token_id is not None and config.constraint is not None:
        raise ConfigError(
            f"no_timestamps_token_id is {config.no_timestamps_token_id}, whose rules compare the "
            "times with all other tokens, and constraint is given, which leaves some of them out; "
            "leave out one"
        )


def _check_draft_beams(config: DecodingConfig) -> None:
    """Refuse drafted layers that do not fit the other options."""
    widths = config.layer_widths
    if len(widths) != config.draft_length:
        raise ConfigError(
            f"draft_beams {shown(widths)} has {len(widths)} layers, draft_length is "
            f"{config.draft_length}; give one number per layer or one for all"
        )
    narrowest = min(widths, default=config.width)
    if narrowest < config.smallest_width:
        raise ConfigError(
            f"draft_beams has a layer of {narrowest}, narrower than {config.smallest_width}, "
            "the fewest beams that are kept: it could never be accepted; widen it, or "
            "lower min_beams with width_policy 'threshold'"
        )
    if sum(widths) > MOST_NODES:
        raise ConfigError(
            f"draft_beams and draft_length make a forest of {sum(widths)} candidates; expected at "
            f"most {MOST_NODES}: lower one of them"
        )


def _check_throughput(config: DecodingConfig) -> None:
    """Refuse what would let the output depend on how much was drafted, or leave nothing to plan."""
    needed = {  # field: (what it must be, whether it is)
        "coupling": ("'gumbel'", config.coupling in ("gumbel", None)),
        "width_policy": ("'fixed'", config.width_policy == "fixed"),
        "memory": ("'forest'", config.memory == "forest"),
        "replacement": ("False", not config.replacement),
    }
    for field, (wanted, is_met) in needed.items():
        if not is_met:
            raise ConfigError(
                f"{field} is {getattr(config, field)!r}, but draft_policy 'throughput' needs an "
                f"output that does not depend on the draft: expected {wanted}; or use "
                "draft_policy 'fixed'"
            )
    if not config.draft_length:
        raise ConfigError(
            "draft_length is 0, which leaves draft_policy 'throughput' nothing to draft; use at "
            "least 1, or draft_policy 'fixed'"
        )
