"""The options of a request, resolved and checked at construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from dsbd_ort.decoding.config_checks import (
    MOST_BEAMS,
    MOST_LAYERS,
    check_combinations,
    check_ranges,
    check_sequences,
    check_strategy,
    check_whole,
)
from dsbd_ort.decoding.errors import ConfigError
from dsbd_ort.decoding.strategies import STRATEGIES, Strategy


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """The options of one request; what is None is resolved by the strategy at construction.

    Attributes:
        strategy: a key of ``STRATEGIES``.
        num_beams: W, beams of the output law. Default 4, or 1 for single-beam strategies.
        coupling: how draft and target draws hang together: "gumbel" (default; the output does not
            depend on the draft) or "rejection" (the paper's). Sampling strategies only.
        width_policy: "fixed" keeps W beams in every layer, which is beam sampling's exact law;
            "threshold" (the paper's dynamic width) keeps as many as are likely to be accepted.
            Default "threshold" for dsbd with fixed drafting, "fixed" for all others.
        min_beams: fewest beams that "threshold" keeps. Default half of ``num_beams``.
        accept_threshold: probability with which "threshold" wants a layer accepted.
        draft_policy: "fixed" drafts ``draft_length`` layers of ``draft_beams`` candidates;
            "throughput" as much as is expected to pay, with both numbers as upper limits. It
            needs an output that does not depend on the draft: gumbel coupling or search, fixed
            width, memory "forest".
        draft_length: gamma, layers of a drafted forest. Default 4 (a limit of 8 for
            "throughput"), or 0 without a draft.
        draft_beams: W_S, candidates of a drafted layer: one number or one per layer. Default
            ``num_beams``; 4 for single-beam strategies that draft a tree; four times as many as
            a limit for "throughput".
        memory: "forest" goes on with all beams; "single" (the paper's memory reduction) with the
            one of highest log-probability per token after each iteration.
        replacement: draw beams i.i.d. (the paper's theorem) instead of distinct ones.
        temperature, top_k, top_p: warping of both models; top_k 0 and top_p 1 switch it off.
            Temperature 0 belongs to the search and joint strategies.
        max_new_tokens: longest continuation, the end-of-sequence token included.
        seed: of the request; used by the pipeline, ``decode`` takes a generator instead.
        num_return_sequences: how many of the final beams to return, best first.
        length_penalty: sequences are ranked by logprob / num_new_tokens ** length_penalty.
        early_stopping: of beam search, as in transformers: False, True or "never".
        joint_threshold: of mjsd: joint likelihood ratio that accepted tokens must exceed.
            Default 0.1.
        joint_tokens, joint_beams: of mjgd: tokens decided jointly, beams that search them.
            Default 4 each.
        stop_strings: one text or several. A sequence whose text (special tokens left out) contains
            one ends there; its text is cut before it.
        eos_token_id: one id, several, or None for what the model says (none in ``decode``).
    """

    strategy: str = "dsbd"
    num_beams: int | None = None
    coupling: Literal["gumbel", "rejection"] | None = None
    width_policy: Literal["fixed", "threshold"] | None = None
    min_beams: int | None = None
    accept_threshold: float = 0.7
    draft_policy: Literal["fixed", "throughput"] = "fixed"
    draft_length: int | None = None
    draft_beams: int | Sequence[int] | None = None
    memory: Literal["forest", "single"] = "forest"
    replacement: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 64
    seed: int = 0
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    joint_threshold: float | None = None
    joint_tokens: int | None = None
    joint_beams: int | None = None
    stop_strings: str | Sequence[str] | None = None
    eos_token_id: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_strategy(self)
        check_sequences(self)
        self._resolve()
        check_ranges(self)
        check_combinations(self)

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
    def most_draft_beams(self) -> int:
        """Most candidates of any drafted layer, 0 without a draft."""
        return max(self.layer_widths, default=0)

    @property
    def joint_limit(self) -> float:
        """The resolved ``joint_threshold``."""
        return 0.1 if self.joint_threshold is None else self.joint_threshold

    @property
    def block_length(self) -> int:
        """The resolved ``joint_tokens``."""
        return self.joint_tokens or 4

    @property
    def search_width(self) -> int:
        """The resolved ``joint_beams``."""
        return self.joint_beams or 4

    @property
    def eos_ids(self) -> frozenset[int]:
        """The end-of-sequence ids, as a set."""
        if self.eos_token_id is None:
            return frozenset()
        many = not isinstance(self.eos_token_id, int)
        return frozenset(self.eos_token_id if many else (self.eos_token_id,))  # type: ignore[arg-type]

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop strings, as a tuple."""
        if isinstance(self.stop_strings, str):
            return (self.stop_strings,)
        return tuple(self.stop_strings or ())

    def _resolve(self) -> None:
        def default(name: str, value: object) -> None:
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

        row = self.row
        default("num_beams", 4 if row.has_beams else 1)
        check_whole(self, "num_beams", 1, MOST_BEAMS)
        default("coupling", "gumbel" if row.rule == "sample" else None)
        is_planned = self.draft_policy == "throughput"
        is_dynamic = self.strategy == "dsbd" and not is_planned
        default("width_policy", "threshold" if is_dynamic else "fixed")
        default("min_beams", max(1, self.width // 2))
        default("draft_length", 0 if not row.has_draft else 8 if is_planned else 4)
        check_whole(self, "draft_length", 0, MOST_LAYERS)
        usual = 4 if row.has_draft_tree and not row.has_beams else self.width
        default("draft_beams", 4 * usual if is_planned and row.has_draft_tree else usual)
        per_layer = self.draft_beams
        if isinstance(per_layer, int):
            per_layer = (per_layer,) * self.draft_length  # type: ignore[operator]
        object.__setattr__(self, "draft_beams", tuple(per_layer))  # type: ignore[arg-type]
