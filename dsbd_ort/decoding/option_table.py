"""The table of options: the values of each, where it means something, and its default there.

One row per field of DecodingConfig. Where an option means nothing it is refused, unless its value
changes nothing (a neutral value) or states what happens anyway (a redundant one).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dsbd_ort.decoding.errors import ConfigError
from dsbd_ort.decoding.option_values import (
    Biases,
    Domain,
    Number,
    Objects,
    OneOf,
    Texts,
    TokenSequences,
    Whole,
    Wholes,
    shown,
)
from dsbd_ort.decoding.strategies import STRATEGIES, Strategy, unnamed_strategy

MOST_BEAMS = MOST_LAYERS = 1024
USUAL_BEAMS = 4
MOST_NODES = 16_384  # of a forest, whose mask has a cell for every pair of nodes
MOST_TOP_LOGPROBS = 20  # as OpenAI allows
_USUAL_THRESHOLD = 0.7
_MOST = 2**31 - 1
_LARGEST = sys.float_info.max


class Deciding(Protocol):
    """The options that decide which others mean something, and what they resolve to."""

    @property
    def strategy(self) -> str | None:
        """A key of ``STRATEGIES``."""

    @property
    def row(self) -> Strategy:
        """Its row of the table of strategies."""

    @property
    def width(self) -> int:
        """The resolved ``num_beams``."""

    @property
    def coupling(self) -> str | None:
        """Either "gumbel" or "rejection"; None where nothing is sampled."""

    @property
    def width_policy(self) -> str | None:
        """Either "fixed" or "threshold"."""

    @property
    def min_beams(self) -> int | None:
        """Fewest beams that a layer keeps."""

    @property
    def accept_threshold(self) -> float:
        """Probability with which a layer is to be accepted."""

    @property
    def memory(self) -> str:
        """Either "forest" or "single"."""

    @property
    def replacement(self) -> bool:
        """Whether beams are drawn i.i.d."""

    @property
    def drafter(self) -> str | None:
        """What drafts; None is decided where it is known whether there is a draft model."""

    @property
    def draft_policy(self) -> str | None:
        """Either "fixed" or "throughput"; None is decided where the engines' costs are known."""

    @property
    def draft_length(self) -> int | None:
        """Layers of a drafted forest; None follows an undecided draft policy."""

    @property
    def draft_beams(self) -> object:
        """Candidates of its layers."""

    @property
    def temperature(self) -> float:
        """Of the request."""

    @property
    def no_timestamps_token_id(self) -> int | None:
        """The token before a speech model's times, None where the output has none."""


@dataclass(frozen=True)
class Condition:
    """A condition without which an option means nothing.

    Attributes:
        option: the name of the option that decides.
        is_met: whether it holds.
        remedy: the value of that option to use instead, for a message.
    """

    option: str
    is_met: Callable[[Deciding], bool]
    remedy: str


@dataclass(frozen=True, kw_only=True)
class OptionRow:
    """The row of one option.

    Attributes:
        domain: its values.
        default: what None resolves to where the option means something; without it None is no
            value of the option.
        needs: all must be met for it to mean something.
        neutral: the values that it may have where it means nothing; the first is the one stored.
        is_redundant: where it means nothing, whether any value states what happens anyway.
    """

    domain: Domain
    default: Callable[[Deciding], Any] | None = None
    needs: tuple[Condition, ...] = ()
    neutral: Callable[[Deciding], tuple[Any, ...]] = lambda _: ()
    is_redundant: Callable[[Deciding], bool] = lambda _: False

    def unmet(self, options: Deciding) -> Condition | None:
        """Return the first condition that is not met, None where the option means something."""
        return next((need for need in self.needs if not need.is_met(options)), None)


_BEAMS = Condition("strategy", lambda o: o.row.has_beams, "one with beams such as dsbd")
_DRAFT = Condition("strategy", lambda o: o.row.has_draft, "one with a draft such as dsbd")
_DRAFT_TREE = Condition(
    "strategy", lambda o: o.row.has_draft_tree, "one that drafts a tree such as tree-speculative"
)
_SAMPLING = Condition("strategy", lambda o: o.row.rule == "sample", "one that samples such as dsbd")
_SEVERAL_DRAWS = Condition(
    "strategy", lambda o: o.row.has_beams or o.row.has_draft_tree, "one with beams such as dsbd"
)
_NO_SEARCH = Condition(
    "strategy", lambda o: o.row.rule != "search", "one that samples such as dsbd"
)
_MJSD = Condition("strategy", lambda o: o.row.rule == "joint", "mjsd")
_MJGD = Condition("strategy", lambda o: o.row.rule == "joint-greedy", "mjgd")
_SAMPLED_BEAMS_OF_A_DRAFT = Condition(
    "strategy",
    lambda o: o.row.rule == "sample" and o.row.has_draft and o.row.has_beams,
    "dsbd",
)
_DRAFTING = Condition("drafter", lambda o: o.drafter != "none", "'model' or 'ngram'")
_FREE_OF_THE_DRAFT = Condition(  # an output that can be: it may take a coupling as well
    "strategy",
    lambda o: o.row.has_draft and o.row.rule in ("sample", "search"),
    "one with a draft, which its output may not depend on, such as dsbd",
)
_THRESHOLD = Condition("width_policy", lambda o: o.width_policy == "threshold", "'threshold'")
_TIMES = Condition(
    "no_timestamps_token_id",
    lambda o: o.no_timestamps_token_id is not None,
    "the token before the times of a speech model",
)
_EVERY_BEAM = Condition("memory", lambda o: o.memory == "forest", "'forest'")
_DRAFTED_LAYERS = Condition("draft_length", lambda o: o.draft_length != 0, "at least 1")
_DYNAMIC_WIDTH = (_SAMPLED_BEAMS_OF_A_DRAFT, _THRESHOLD, _DRAFTED_LAYERS)


def _half_width(options: Deciding) -> int:
    return max(1, options.width // 2)


def _usual_width_policy(options: Deciding) -> str:
    """Return "threshold" where one of its options is given and it is possible, else "fixed"."""
    is_given = options.min_beams is not None or options.accept_threshold != _USUAL_THRESHOLD
    is_possible = options.draft_length != 0 and options.draft_policy != "throughput"
    return "threshold" if is_given and is_possible else "fixed"


def _usual_draft_policy(options: Deciding) -> str | None:
    """Return "fixed" where a shape is given or the draft could be seen, else None: undecided."""
    has_shape = options.draft_length is not None or options.draft_beams is not None
    is_seen = (
        options.coupling == "rejection"
        or options.width_policy == "threshold"
        or options.memory == "single"
        or options.replacement
    )
    return "fixed" if has_shape or is_seen else None


def _usual_draft_length(options: Deciding) -> int | None:
    return {"fixed": 4, "throughput": 8, None: None}[options.draft_policy]


def _usual_draft_beams(options: Deciding) -> int | None:
    usual = options.width if options.row.has_beams else 4
    if options.draft_policy == "throughput":
        return max(usual, min(4 * usual, MOST_NODES // max(options.draft_length or 0, 1)))
    return usual if options.draft_policy == "fixed" else None


def _one_path(options: Deciding) -> tuple[Any, ...]:
    """Return what draft_beams may be where there is no tree to draft."""
    if options.draft_length is None:
        return (None, 1)
    layers = (1,) * options.draft_length
    return (layers, 1) if layers else (layers,)


OPTION_TABLE = {  # resolved in this order: what decides stands above what it decides
    "strategy": OptionRow(
        domain=OneOf(tuple(STRATEGIES), is_quoted=False),
        default=lambda o: unnamed_strategy("dsbd", {"temperature": o.temperature})["strategy"],
    ),
    "num_beams": OptionRow(
        domain=Whole(1, MOST_BEAMS),
        default=lambda _: USUAL_BEAMS,
        needs=(_BEAMS,),
        neutral=lambda _: (1,),
    ),
    "coupling": OptionRow(
        domain=OneOf(("gumbel", "rejection")),
        default=lambda _: "gumbel",
        needs=(_SAMPLING,),
        neutral=lambda _: (None,),
    ),
    "width_policy": OptionRow(
        domain=OneOf(("fixed", "threshold")),
        default=_usual_width_policy,
        needs=(_SAMPLED_BEAMS_OF_A_DRAFT,),
        neutral=lambda _: ("fixed",),
    ),
    "drafter": OptionRow(
        domain=OneOf(("model", "ngram", "model+ngram", "none")),
        default=lambda _: None,
        needs=(_FREE_OF_THE_DRAFT,),
        neutral=lambda o: ("model" if o.row.has_draft else "none",),
    ),
    "draft_policy": OptionRow(
        domain=OneOf(("fixed", "throughput")),
        default=_usual_draft_policy,
        needs=(_FREE_OF_THE_DRAFT, _DRAFTING),
        neutral=lambda _: ("fixed",),
    ),
    "draft_length": OptionRow(
        domain=Whole(0, MOST_LAYERS),
        default=_usual_draft_length,
        needs=(_DRAFT, _DRAFTING),
        neutral=lambda _: (0,),
    ),
    "draft_beams": OptionRow(
        domain=Wholes(Whole(1, MOST_NODES), MOST_LAYERS, is_ordered=True),
        default=_usual_draft_beams,
        needs=(_DRAFT, _DRAFTED_LAYERS, _DRAFT_TREE),
        neutral=_one_path,
    ),
    "min_beams": OptionRow(
        domain=Whole(1, MOST_BEAMS),
        default=_half_width,
        needs=_DYNAMIC_WIDTH,
        neutral=lambda o: (None, o.width, _half_width(o)),
    ),
    "accept_threshold": OptionRow(
        domain=Number(0.0, 1.0), needs=_DYNAMIC_WIDTH, neutral=lambda _: (_USUAL_THRESHOLD,)
    ),
    "memory": OptionRow(
        domain=OneOf(("forest", "single")),
        needs=(_SAMPLED_BEAMS_OF_A_DRAFT,),
        neutral=lambda _: ("forest",),
    ),
    "replacement": OptionRow(
        domain=OneOf((False, True)),
        needs=(_SAMPLING, _SEVERAL_DRAWS),
        neutral=lambda _: (False,),
    ),
    "top_k": OptionRow(
        domain=Whole(0, _MOST, off=-1),
        needs=(_NO_SEARCH,),
        neutral=lambda _: (0,),
        is_redundant=lambda o: o.temperature == 0.0,  # the best token is in every such set
    ),
    "top_p": OptionRow(
        domain=Number(0.0, 1.0, is_open=True),
        needs=(_NO_SEARCH,),
        neutral=lambda _: (1.0,),
        is_redundant=lambda o: o.temperature == 0.0,
    ),
    "temperature": OptionRow(
        domain=Number(0.0, _LARGEST, least_positive=1e-6),  # a logit divided by it stays finite
        needs=(_NO_SEARCH,),
        neutral=lambda _: (1.0, 0.0),
    ),
    "min_p": OptionRow(
        domain=Number(0.0, 1.0),
        needs=(_NO_SEARCH,),
        neutral=lambda _: (0.0,),
        is_redundant=lambda o: o.temperature == 0.0,
    ),
    "typical_p": OptionRow(
        domain=Number(0.0, 1.0, is_open=True), needs=(_NO_SEARCH,), neutral=lambda _: (1.0,)
    ),
    "repetition_penalty": OptionRow(domain=Number(1e-6, 1e6)),
    "presence_penalty": OptionRow(domain=Number(-1e6, 1e6)),
    "frequency_penalty": OptionRow(domain=Number(-1e6, 1e6)),
    "no_repeat_ngram_size": OptionRow(domain=Whole(0, 1024)),
    "encoder_no_repeat_ngram_size": OptionRow(domain=Whole(0, 1024)),
    "bad_words_ids": OptionRow(domain=TokenSequences(4096, 256)),
    "logit_bias": OptionRow(domain=Biases(4096, Number(-1e9, 1e9))),
    "suppress_tokens": OptionRow(
        domain=Wholes(Whole(0, _MOST), 65_536, is_ordered=False, noun="token id")
    ),
    "begin_suppress_tokens": OptionRow(
        domain=Wholes(Whole(0, _MOST), 65_536, is_ordered=False, noun="token id")
    ),
    "no_timestamps_token_id": OptionRow(domain=Whole(0, _MOST), default=lambda _: None),
    "max_initial_timestamp_index": OptionRow(
        domain=Whole(0, _MOST), default=lambda _: None, needs=(_TIMES,), neutral=lambda _: (None,)
    ),
    "last_timestamp_token_id": OptionRow(
        domain=Whole(0, _MOST), default=lambda _: None, needs=(_TIMES,), neutral=lambda _: (None,)
    ),
    "min_new_tokens": OptionRow(domain=Whole(0, _MOST)),
    "forced_bos_token_id": OptionRow(domain=Whole(0, _MOST), default=lambda _: None),
    "forced_eos_token_id": OptionRow(domain=Whole(0, _MOST), default=lambda _: None),
    "constraint": OptionRow(
        domain=Objects(
            (("start", "advance", "allowed", "accepts", "has_ended"), ("bind",)),
            "a constraint, such as dsbd_ort.JsonSchema or {'regex': '[0-9]+'}",
        ),
        default=lambda _: None,
    ),
    "logits_processors": OptionRow(
        domain=Objects(
            (("__call__",),), "a list of functions of a path and its scores", is_list=True
        )
    ),
    "max_new_tokens": OptionRow(domain=Whole(1, _MOST)),
    "seed": OptionRow(  # taken where nothing is drawn: clients send it
        domain=Whole(0, 2**128 - 1), default=lambda _: None
    ),
    "num_return_sequences": OptionRow(
        domain=Whole(1, MOST_BEAMS), needs=(_BEAMS,), neutral=lambda _: (1,)
    ),
    "length_penalty": OptionRow(  # of one sequence too: ``score`` says it, best_of ranks by it
        domain=Number(-30.0, 30.0)  # num_new_tokens to the power of it stays finite
    ),
    "early_stopping": OptionRow(
        domain=OneOf((False, True, "never")),
        needs=(_BEAMS, _EVERY_BEAM),
        neutral=lambda _: (False,),
    ),
    "joint_threshold": OptionRow(
        domain=Number(0.0, _LARGEST, is_open=True),
        default=lambda _: 0.1,
        needs=(_MJSD,),
        neutral=lambda _: (None,),
    ),
    "joint_tokens": OptionRow(
        domain=Whole(1, _MOST), default=lambda _: 4, needs=(_MJGD,), neutral=lambda _: (None,)
    ),
    "joint_beams": OptionRow(
        domain=Whole(1, MOST_BEAMS), default=lambda _: 4, needs=(_MJGD,), neutral=lambda _: (None,)
    ),
    "stop_strings": OptionRow(domain=Texts(256, 4096), default=lambda _: None),
    "eos_token_id": OptionRow(
        domain=Wholes(Whole(0, _MOST), 1024, is_ordered=False, noun="token id"),
        default=lambda _: None,
    ),
    "top_logprobs": OptionRow(domain=Whole(0, MOST_TOP_LOGPROBS)),
    "prompt_logprobs": OptionRow(domain=OneOf((False, True))),
    "skip_special_tokens": OptionRow(domain=OneOf((False, True))),
}


IN_PYTHON_ALONE = ("logits_processors",)
"""Options whose values no text or JSON can give."""


def read_option(name: str, value: object) -> Any:
    """Return a value in its plain form, None where None is to be resolved.

    Raises:
        ConfigError: it is no value of the option.
    """
    row = OPTION_TABLE[name]
    return None if value is None and row.default else row.domain.read(name, value)


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the known ones in their plain form, see ``read_option``.

    Unknown names are left to ``DecodingConfig.from_options``, which refuses them.
    """
    return {
        name: read_option(name, value) if name in OPTION_TABLE else value
        for name, value in options.items()
    }


def resolved_option(name: str, value: Any, options: Deciding) -> Any:
    """Return what a value that was read resolves to under the ``options`` above it in the table.

    Raises:
        ConfigError: the option means nothing there, and the value is neither neutral nor redundant.
    """
    row = OPTION_TABLE[name]
    unmet = row.unmet(options)
    if unmet is None:
        return row.default(options) if value is None and row.default else value
    neutral = row.neutral(options)
    if value is None or value in neutral or row.is_redundant(options):
        return neutral[0]
    decided = f"to strategy {options.strategy}"
    if unmet.option != "strategy":
        decided = f"with {unmet.option} {getattr(options, unmet.option)!r}"
    usual = f"use {neutral[0]!r}" if neutral[0] not in (None, ()) else "leave it out"
    raise ConfigError(
        f"{name} is {shown(value)}, which means nothing {decided}; {usual}, or set {unmet.option} "
        f"to {unmet.remedy}"
    )
