"""The options of a request and the table of strategies (ALGORITHM.md section 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from dsbd_ort.decoding.errors import ConfigError

WidthPolicy = Literal["fixed", "threshold"]


@dataclass(frozen=True)
class Strategy:
    """One row of the table: what a decoder differs in from the others.

    Attributes:
        rule: how a layer is selected.
        has_draft: whether a draft model proposes a forest.
        has_beams: whether ``num_beams`` may exceed 1.
        has_draft_tree: whether ``draft_beams`` may exceed 1.
    """

    rule: Literal["sample"]
    has_draft: bool
    has_beams: bool
    has_draft_tree: bool


STRATEGIES = {
    "dsbd": Strategy("sample", has_draft=True, has_beams=True, has_draft_tree=True),
    "beam-sample": Strategy("sample", has_draft=False, has_beams=True, has_draft_tree=False),
    "speculative": Strategy("sample", has_draft=True, has_beams=False, has_draft_tree=False),
    "sample": Strategy("sample", has_draft=False, has_beams=False, has_draft_tree=False),
}


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """The options of one request; what is None is resolved by the strategy at construction.

    Attributes:
        strategy: a key of ``STRATEGIES``.
        num_beams: W, beams of the output law. Default 4, or 1 for single-beam strategies.
        width_policy: "fixed" keeps W beams in every layer, which is beam sampling's exact law;
            "threshold" (the paper's dynamic width) keeps as many as are likely to be accepted.
            Default "threshold" for dsbd, "fixed" for all others.
        min_beams: fewest beams that "threshold" keeps. Default half of ``num_beams``.
        accept_threshold: probability with which "threshold" wants a layer accepted.
        draft_length: gamma, layers of a drafted forest. Default 4, or 0 without a draft.
        draft_beams: W_S, candidates of a drafted layer: one number or one per layer. Default
            ``num_beams``.
        temperature, top_k, top_p: warping of both models; top_k 0 and top_p 1 switch it off.
        max_new_tokens: longest continuation, the end-of-sequence token included.
        seed: of the request; used by the pipeline, ``decode`` takes a generator instead.
        num_return_sequences: how many of the final beams to return, best first.
        length_penalty: sequences are ranked by logprob / num_new_tokens ** length_penalty.
        eos_token_id: one id, several, or None for what the model says (none in ``decode``).
    """

    strategy: str = "dsbd"
    num_beams: int | None = None
    width_policy: WidthPolicy | None = None
    min_beams: int | None = None
    accept_threshold: float = 0.7
    draft_length: int | None = None
    draft_beams: int | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 64
    seed: int = 0
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    eos_token_id: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ConfigError(
                f"strategy is {self.strategy!r}; expected one of {', '.join(STRATEGIES)}"
            )
        self._resolve()
        self._check_ranges()
        self._check_combinations()

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> DecodingConfig:
        """Build a config from keyword arguments; an unknown name is a ConfigError."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(options) - known):
            raise ConfigError(f"unknown option {unknown[0]!r}; expected one of {sorted(known)}")
        return cls(**options)

    @property
    def row(self) -> Strategy:
        """The strategy's row of the table."""
        return STRATEGIES[self.strategy]

    @property
    def width(self) -> int:
        """W, the resolved ``num_beams``."""
        assert self.num_beams is not None  # resolved at construction
        return self.num_beams

    @property
    def smallest_width(self) -> int:
        """Fewest beams that the width policy ever keeps."""
        assert self.min_beams is not None  # resolved at construction
        return self.min_beams if self.width_policy == "threshold" else self.width

    @property
    def layer_widths(self) -> tuple[int, ...]:
        """W_S of every drafted layer, first to last; empty without a draft."""
        assert isinstance(self.draft_beams, tuple)  # resolved at construction
        return self.draft_beams

    @property
    def eos_ids(self) -> frozenset[int]:
        """The end-of-sequence ids, as a set."""
        if self.eos_token_id is None:
            return frozenset()
        many = not isinstance(self.eos_token_id, int)
        return frozenset(self.eos_token_id if many else (self.eos_token_id,))  # type: ignore[arg-type]

    def _resolve(self) -> None:
        def default(name: str, value: object) -> None:
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

        default("num_beams", 4 if self.row.has_beams else 1)
        default("width_policy", "threshold" if self.strategy == "dsbd" else "fixed")
        _check_int(self, "num_beams", 1)
        default("min_beams", max(1, self.width // 2))
        default("draft_length", 4 if self.row.has_draft else 0)
        _check_int(self, "draft_length", 0)
        default("draft_beams", self.width)
        per_layer = self.draft_beams
        if isinstance(per_layer, int):
            per_layer = (per_layer,) * self.draft_length  # type: ignore[operator]
        object.__setattr__(self, "draft_beams", tuple(per_layer))  # type: ignore[arg-type]

    def _check_ranges(self) -> None:
        for name, least in (("min_beams", 1), ("top_k", 0), ("max_new_tokens", 1), ("seed", 0)):
            _check_int(self, name, least)
        _check_int(self, "num_return_sequences", 1)
        for name, low, high in (
            ("accept_threshold", 0.0, 1.0),
            ("temperature", 0.0, math.inf),
            ("top_p", 0.0, 1.0),
            ("length_penalty", -math.inf, math.inf),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{name} is {value!r}; expected a number")
            if not low <= value <= high or math.isinf(value):
                raise ConfigError(f"{name} is {value}; expected a number from {low} to {high}")
        if self.top_p == 0.0:
            raise ConfigError("top_p is 0; expected more than 0 (1 switches it off)")
        if self.width_policy not in get_args(WidthPolicy):
            raise ConfigError(
                f"width_policy is {self.width_policy!r}; expected one of {get_args(WidthPolicy)}"
            )
        if any(not isinstance(i, int) or i < 0 for i in self.eos_ids):
            raise ConfigError(f"eos_token_id is {self.eos_token_id!r}; expected token ids >= 0")

    def _check_combinations(self) -> None:
        name, row = self.strategy, self.row
        if not row.has_beams and self.width != 1:
            raise ConfigError(
                f"num_beams is {self.width}, but strategy {name} has one beam; use num_beams 1 or "
                "a beam strategy such as beam-sample"
            )
        if not row.has_draft and self.draft_length:
            raise ConfigError(
                f"draft_length is {self.draft_length}, but strategy {name} drafts nothing; leave "
                "it out or use dsbd"
            )
        if self.temperature == 0.0:
            raise ConfigError(f"temperature is 0, but strategy {name} samples; use more than 0")
        if self.min_beams > self.width:  # type: ignore[operator]
            raise ConfigError(
                f"min_beams is {self.min_beams}, more than num_beams {self.width}; lower it"
            )
        if self.num_return_sequences > self.smallest_width:
            raise ConfigError(
                f"num_return_sequences is {self.num_return_sequences}, but as few as "
                f"{self.smallest_width} beams may be kept; lower it, or raise num_beams or "
                "min_beams"
            )
        if self.width_policy == "threshold" and not row.has_draft:
            raise ConfigError(
                f"width_policy is 'threshold', but strategy {name} has no draft to be accepted; "
                "use 'fixed'"
            )
        self._check_draft_beams()

    def _check_draft_beams(self) -> None:
        widths = self.layer_widths
        if len(widths) != self.draft_length:
            raise ConfigError(
                f"draft_beams {widths} has {len(widths)} layers, draft_length is "
                f"{self.draft_length}; give one number per layer or one for all"
            )
        for width in widths:
            if isinstance(width, bool) or not isinstance(width, int) or width < self.smallest_width:
                raise ConfigError(
                    f"draft_beams has a layer of {width!r}, narrower than {self.smallest_width}, "
                    "the fewest beams that are kept: it could never be accepted; widen it, or "
                    "lower min_beams with width_policy 'threshold'"
                )
            if width != 1 and not self.row.has_draft_tree:
                raise ConfigError(
                    f"draft_beams is {width}, but strategy {self.strategy} drafts one path; use 1"
                )


def _check_int(config: DecodingConfig, name: str, least: int) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}; expected a whole number")
    if value < least:
        raise ConfigError(f"{name} is {value}; expected at least {least}")
