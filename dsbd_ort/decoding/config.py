"""The options of a request: as they are given, and resolved and checked."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

from dsbd_ort.decoding.errors import ConfigError
from dsbd_ort.decoding.option_row import MOST_NODES
from dsbd_ort.decoding.option_table import OPTION_TABLE, PROCESSORS, resolved_options
from dsbd_ort.decoding.option_values import shown
from dsbd_ort.decoding.strategies import STRATEGIES, Strategy


class DecodingOptions(TypedDict, total=False):
    """The options that a caller gives; numbers may be of any exact type, numpy's too."""

    strategy: str | None
    num_beams: int | None
    coupling: Literal["gumbel", "rejection"] | None
    width_policy: Literal["fixed", "threshold"] | None
    min_beams: int | None
    accept_threshold: float
    drafter: Literal["model", "ngram", "model+ngram", "none"] | None
    predicted_text: str | None
    predicted_token_ids: Sequence[int]
    draft_policy: Literal["fixed", "throughput"] | None
    draft_length: int | None
    draft_beams: int | Sequence[int] | None
    draft_context: int | Literal["all", "auto"]
    memory: Literal["forest", "single"]
    replacement: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int
    encoder_no_repeat_ngram_size: int
    bad_words_ids: Sequence[int | Sequence[int]]
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    suppress_tokens: int | Sequence[int]
    begin_suppress_tokens: int | Sequence[int]
    no_timestamps_token_id: int | None
    max_initial_timestamp_index: int | None
    last_timestamp_token_id: int | None
    min_new_tokens: int
    forced_bos_token_id: int | None
    forced_eos_token_id: int | None
    constraint: Any
    logits_processors: Sequence[Any]
    scorers: Sequence[Any]
    max_new_tokens: int
    seed: int | None
    num_return_sequences: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    joint_threshold: float | None
    joint_tokens: int | None
    joint_beams: int | None
    stop_strings: str | Sequence[str] | None
    eos_token_id: int | Sequence[int] | None
    top_logprobs: int
    prompt_logprobs: bool
    skip_special_tokens: bool


@dataclass(frozen=True, kw_only=True, init=False)
class DecodingConfig:
    """The options of one request, all of them, checked, as plain Python values.

    ``OPTION_TABLE`` explains each, and has the defaults. An option that means nothing to the
    strategy or to another option is refused unless its value is neutral.

    Attributes:
        drafter: None: the draft model if the bundle has one, else n-grams.
        draft_policy: None: "throughput" if the costs of engine calls are known, else "fixed".
            ``draft_length`` and ``draft_beams`` (one number for each layer) are None as long as it
            is. ``settled`` decides them.
        seed: None: a random one. ``decode`` takes a generator instead.
        eos_token_id: None: the model's own; none in ``decode``.
        min_beams, coupling: None if the width is fixed; if nothing is sampled.
    """

    # Written by scripts/option_tables.py:
    strategy: str
    num_beams: int
    num_return_sequences: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    coupling: Literal["gumbel", "rejection"] | None
    width_policy: Literal["fixed", "threshold"]
    drafter: Literal["model", "ngram", "model+ngram", "none"] | None
    predicted_text: str | None
    predicted_token_ids: tuple[int, ...]
    draft_policy: Literal["fixed", "throughput"] | None
    draft_length: int | None
    draft_beams: tuple[int, ...] | None
    draft_context: int | Literal["all", "auto"]
    min_beams: int | None
    accept_threshold: float
    memory: Literal["forest", "single"]
    replacement: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    seed: int | None
    max_new_tokens: int
    min_new_tokens: int
    stop_strings: tuple[str, ...]
    eos_token_id: tuple[int, ...] | None
    forced_eos_token_id: int | None
    forced_bos_token_id: int | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int
    encoder_no_repeat_ngram_size: int
    bad_words_ids: tuple[tuple[int, ...], ...]
    logit_bias: tuple[tuple[int, float], ...]
    suppress_tokens: tuple[int, ...]
    begin_suppress_tokens: tuple[int, ...]
    no_timestamps_token_id: int | None
    max_initial_timestamp_index: int | None
    last_timestamp_token_id: int | None
    logits_processors: tuple[Any, ...]
    scorers: tuple[Any, ...]
    constraint: Any
    top_logprobs: int
    prompt_logprobs: bool
    skip_special_tokens: bool
    joint_threshold: float
    joint_tokens: int
    joint_beams: int
    # End of what it writes.

    def __init__(self, /, **options: Unpack[DecodingOptions]) -> None:
        self._set(resolved_options(options))

    def _set(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)
        _check_widths(self)
        _check_times(self)
        if self.draft_policy is not None:
            _check_draft_beams(self)
        if self.draft_policy == "throughput":
            _check_throughput(self)

    def settled(self, *, costs_are_known: bool, has_draft: bool = True) -> DecodingConfig:
        """Return the config with nothing left open about drafting; itself if nothing is.

        ``max_new_tokens`` is at most the length of the constraint's longest path.
        """
        longest = self.longest_path
        is_shorter = longest is not None and longest < self.max_new_tokens
        if self.drafter is not None and self.draft_policy is not None and not is_shorter:
            return self
        values = {**vars(self), **({"max_new_tokens": longest} if is_shorter else {})}
        settled = copy.copy(self)
        settled._set(resolved_options(values, has_draft, costs_are_known))
        return settled

    @property
    def row(self) -> Strategy:
        return STRATEGIES[self.strategy]

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
    def layer_widths(self) -> tuple[int, ...]:
        """W_S of every drafted layer, first to last; empty without a draft, or as long as open."""
        return self.draft_beams or ()

    @property
    def most_draft_beams(self) -> int:
        """Most candidates of any drafted layer, 0 without a draft."""
        return max(self.layer_widths, default=0)

    @property
    def smallest_width(self) -> int:
        """Fewest beams that the width policy ever keeps."""
        return self.num_beams if self.min_beams is None else self.min_beams

    @property
    def widest_search(self) -> int:
        """Most beams that are live at any time: num_beams, or joint_beams of mjgd."""
        return self.joint_beams if self.row.rule == "joint-greedy" else self.num_beams

    @property
    def logits_options(self) -> list[str]:
        """The options given that are processors or a constraint."""
        return [n for n in PROCESSORS if getattr(self, n) != OPTION_TABLE[n].default]

    @property
    def processes_logits(self) -> bool:
        """Whether a processor or a constraint changes what may be drawn."""
        return bool(self.logits_options)

    @property
    def longest_path(self) -> int | None:
        """Tokens after which a sequence has ended by the constraint; None if that is unknown."""
        most: int | None = getattr(self.constraint, "most_tokens", None)
        if most is None or self.forced_eos_token_id is not None:
            return None
        return max(most, self.min_new_tokens)

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset(self.eos_token_id or ())


def _check_widths(config: DecodingConfig) -> None:
    if config.row.rule == "sample" and config.temperature == 0.0:
        raise ConfigError(
            f"temperature is 0, but strategy {config.strategy} samples; use more than 0, leave "
            f"strategy out, or use its counterpart {config.row.at_zero}"
        )
    if config.smallest_width > config.num_beams:
        raise ConfigError(
            f"min_beams is {config.min_beams}, more than num_beams {config.num_beams}; lower it"
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
    widths = config.layer_widths
    if len(widths) != config.draft_length:
        raise ConfigError(
            f"draft_beams {shown(widths)} has {len(widths)} layers, draft_length is "
            f"{config.draft_length}; give one number per layer or one for all"
        )
    narrowest = min(widths, default=config.num_beams)
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
    """Refuse options that let the output depend on how much was drafted, or forbid a draft."""
    needed = {  # field: (the value it must have, whether it has)
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
