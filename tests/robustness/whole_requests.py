"""Whole requests drawn at random, with every combination of options, on tables."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from dsbd_ort.decoding import (
    STRATEGIES,
    DecodingConfig,
    RequestTrace,
    TableModel,
)
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import CostCurve, EngineCosts
from dsbd_ort.decoding.request import DecodingRequest, Preempts
from tests.decoding.feature_tables import pair_of
from tests.decoding.path_constraint import PathConstraint, chains, some_tokens
from tests.decoding.path_scorer import PathScorer
from tests.decoding.tables import LogitsOf, ends_with, random_table
from tests.decoding.top_table import TopTable
from tests.robustness.preempting import ForcedPreemptions

TABLE_KINDS = ("smooth", "peaked", "rounded", "equal", "forbidding")
DRAFT_KINDS = ("itself", "mixed", "hostile", "forbidding", "features")
FEATURES = "features"  # mixed, or hostile where a row comes from the draft's own feature
PREDICTED = "predicted_token_ids"
NO_DRAFT = "none"  # of requests that need no draft model
HEADS = ("top", "full", "proposed")
"""Outputs of the engines; "proposed": the draft's largest logits, of a vocabulary of its own."""
CHECKS = ("dense", "shared", "crowded", "repeated", "traced", "alone", "native")


@dataclass(frozen=True)
class WholeRequest:
    """A request on tables, and what else is done with it.

    Attributes:
        options: fields of DecodingConfig.
        vocab_size, table, draft, table_seed: the two tables.
        prompt: token ids.
        stop: runs of tokens that end a sequence as a stop string does.
        seconds_a_row: of the target, for draft_policy "throughput".
        head: what the engines return, one of ``HEADS``.
        num_top: logits that a top-k head returns, fewer or more than the request looks at.
        check: the way it is decoded a second time, one of ``CHECKS``.
    """

    options: dict[str, Any]
    vocab_size: int
    table: str
    draft: str
    table_seed: int
    prompt: tuple[int, ...]
    stop: tuple[tuple[int, ...], ...]
    seconds_a_row: float
    head: str
    num_top: int
    check: str
    tables: list[LogitsOf] = field(default_factory=list, compare=False, repr=False)

    @property
    def config(self) -> DecodingConfig:
        return DecodingConfig(**self.options).settled(costs_are_known=True)

    def models(self, head: str | None = None) -> tuple[Any, Any]:
        """Return target and draft or None; with another head than its own where one is given."""
        if not self.tables:
            target = shaped(random_table(self.table_seed, self.vocab_size), self.table)
            self.tables.extend([target, draft_of(self, target)])
        target, draft = self.tables
        if self.draft == FEATURES:
            other = random_table(self.table_seed + 1, self.vocab_size)
            return pair_of(self.vocab_size, target, draft, other, several=True)
        head = head or self.head
        proposed = draft if head != "proposed" else proposing(draft, self.vocab_size)
        return (
            self._model("full" if head == "proposed" else head, target),
            None if self.draft == NO_DRAFT else self._model(head, proposed),
        )

    def _model(self, head: str, table: LogitsOf) -> Any:
        if head == "full":
            return TableModel(self.vocab_size, table)
        # What is missing is read where it matters.
        num_top = min(self.num_top, self.vocab_size)
        if head == "proposed":
            num_top = min(num_top, num_proposed(self.vocab_size))
        return TopTable(self.vocab_size, table, num_top, keeps_full=True)

    def forced(self) -> ForcedPreemptions:
        """Return a new schedule, always the same."""
        return ForcedPreemptions(self.table_seed)

    def request(
        self,
        config: DecodingConfig,
        trace: RequestTrace | None = None,
        preempts: Preempts | None = None,
    ) -> DecodingRequest:
        costs = EngineCosts(
            CostCurve((1, 16), (1e-3, 1e-3 + 15 * self.seconds_a_row)),
            CostCurve((1, 16), (1e-4, 2e-4)),
        )
        return DecodingRequest(
            prompt_ids=self.prompt,
            config=config,
            rng=np.random.default_rng(config.seed),
            stop=ends_with(*self.stop) if self.stop else None,
            costs=costs,
            estimator=AcceptanceEstimator(),
            trace=trace,
            preempts=preempts,
        )


def num_proposed(vocab_size: int) -> int:
    return 1 + vocab_size // 2


def proposing(draft: LogitsOf, vocab_size: int) -> LogitsOf:
    """Return a draft that proposes the even tokens and the last one alone."""
    is_out = np.arange(vocab_size) % 2 == 1
    is_out[-1] = False

    def logits_of(path: tuple[int, ...]) -> NDArray[np.floating]:
        logits = np.where(is_out, -np.inf, draft(path))
        return logits if np.isfinite(logits).any() else np.where(is_out, -np.inf, 0.0)

    return logits_of


def shaped(smooth: LogitsOf, kind: str) -> LogitsOf:
    """Return a table of another kind: with certain tokens, exact ties, or impossible tokens."""

    def forbidding(path: tuple[int, ...]) -> NDArray[np.floating]:
        logits = smooth(path).copy()
        order = np.argsort(logits)
        logits[order[: len(logits) - 1 - (sum(path) + len(path)) % 3]] = -np.inf
        return logits

    kinds: dict[str, LogitsOf] = {
        "smooth": smooth,
        "peaked": lambda path: 400.0 * smooth(path),
        "rounded": lambda path: np.round(smooth(path)),
        "equal": lambda path: np.zeros_like(smooth(path)),
        "forbidding": forbidding,
    }
    return kinds[kind]


def draft_of(request: WholeRequest, target: LogitsOf) -> LogitsOf:
    other = random_table(request.table_seed + 1, request.vocab_size)
    kinds: dict[str, LogitsOf] = {
        "itself": target,
        "mixed": lambda path: 0.7 * np.maximum(target(path), -9.0) + 0.3 * other(path),
        "hostile": other,
        "forbidding": shaped(other, "forbidding"),
        NO_DRAFT: other,
    }
    return kinds["mixed" if request.draft == FEATURES else request.draft]


def fewer_of_the_last(path: NDArray[np.int64], scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """A processor of a user's own, which raises a score as well."""
    scores[path[-1]] -= 0.7
    scores[(path[-1] + len(path)) % len(scores)] += 0.3
    return scores


SOME_TOKENS = st.lists(st.integers(0, 4), min_size=1, max_size=3)
CONSTRAINTS = ("none", "lists", "bits", "ending", "chains")
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "num_beams": st.sampled_from([1, 2, 3, 4, 7] * 8 + [40, 300, 1024]),
    "coupling": st.sampled_from(["gumbel", "rejection"]),
    "width_policy": st.sampled_from(["fixed", "threshold"]),
    "min_beams": st.integers(1, 3),
    "accept_threshold": st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    "drafter": st.sampled_from([None, "model", "ngram", "model+ngram", "none"]),
    "predicted_token_ids": st.lists(st.integers(0, 4), max_size=12),
    "draft_policy": st.sampled_from([None, "fixed", "throughput"]),
    "draft_length": st.integers(0, 4),
    "draft_beams": st.one_of(st.integers(1, 9), st.lists(st.integers(1, 9), max_size=4)),
    "draft_context": st.sampled_from([1, 2, 4, 8, "all", "auto"]),
    "memory": st.sampled_from(["forest", "single"]),
    "replacement": st.booleans(),
    "temperature": st.sampled_from([0.0, 1e-6, 0.5, 1.0, 3.0, 1e3]),
    "top_k": st.sampled_from([0, 1, 2, 5, 400]),
    "top_p": st.sampled_from([1e-9, 0.3, 0.5, 0.9, 0.999, 1.0]),
    "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    "typical_p": st.sampled_from([0.2, 0.9, 1.0]),
    "repetition_penalty": st.sampled_from([0.5, 1.0, 1.1, 2.0]),
    "presence_penalty": st.sampled_from([-1e6, -1.0, 0.0, 0.6]),
    "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.3]),
    "no_repeat_ngram_size": st.integers(0, 4),
    "encoder_no_repeat_ngram_size": st.integers(0, 4),
    "bad_words_ids": st.lists(SOME_TOKENS, max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 2), st.sampled_from([-9.0, -0.5, 1.5, 1e9])),
    "suppress_tokens": st.lists(st.integers(0, 2), max_size=2),
    "begin_suppress_tokens": st.lists(st.integers(0, 2), max_size=2),
    "no_timestamps_token_id": st.one_of(st.none(), st.integers(0, 16)),
    "last_timestamp_token_id": st.one_of(st.none(), st.integers(0, 16)),
    "max_initial_timestamp_index": st.one_of(st.none(), st.integers(0, 3)),
    "min_new_tokens": st.integers(0, 6),
    "forced_bos_token_id": st.integers(0, 2),
    "forced_eos_token_id": st.integers(0, 2),
    "logits_processors": st.sampled_from([(), (fewer_of_the_last,)]),
    "scorers": st.sampled_from([(), (1.0,), (0.0, 0.5)]),
    "constraint": st.sampled_from(CONSTRAINTS),
    "num_return_sequences": st.integers(1, 4),
    "length_penalty": st.sampled_from([-2.0, 0.0, 1.0, 3.0]),
    "early_stopping": st.sampled_from([False, True, "never"]),
    "joint_threshold": st.sampled_from([1e-9, 0.1, 0.9, 5.0]),
    "joint_tokens": st.integers(1, 5),
    "joint_beams": st.integers(1, 6),
    "top_logprobs": st.sampled_from([0, 1, 2, 20]),
    "prompt_logprobs": st.booleans(),
}
OF_RULE = {  # fields that only strategies of some rules take
    "coupling": ("sample",),
    "replacement": ("sample",),
    "temperature": ("sample", "joint"),
    "top_k": ("sample", "joint", "joint-greedy"),
    "top_p": ("sample", "joint", "joint-greedy"),
    "min_p": ("sample", "joint", "joint-greedy"),
    "typical_p": ("sample", "joint", "joint-greedy"),
    "joint_threshold": ("joint",),
    "joint_tokens": ("joint-greedy",),
    "joint_beams": ("joint-greedy",),
}
OF_DRAFT = (
    "drafter",
    "predicted_text",
    "predicted_token_ids",
    "draft_policy",
    "draft_length",
    "draft_beams",
    "draft_context",
)
OF_BEAMS = ("num_beams", "num_return_sequences", "early_stopping")
OF_TREE = ("draft_beams", "replacement")
OF_DSBD = ("width_policy", "min_beams", "accept_threshold", "memory")


def has_meaning(name: str, strategy: str) -> bool:
    """Tell whether a field is likely to be accepted with a strategy."""
    row = STRATEGIES[strategy]
    if name in OF_RULE and row.rule not in OF_RULE[name]:
        return False
    if name in OF_DSBD and strategy != "dsbd":
        return False
    if name in OF_DRAFT and not row.has_draft:
        return False
    if name in OF_TREE and not (row.has_draft_tree or row.has_beams):
        return False
    return row.has_beams or name not in OF_BEAMS


@st.composite
def whole_requests(draw: st.DrawFn, strategy: str, largest_vocab: int = 300) -> WholeRequest:
    """Draw a request of a strategy; one in ten also has a field that it may not have."""
    rarely = draw(st.integers(0, 9)) == 0
    names = [name for name in VALUES if has_meaning(name, strategy) or rarely]
    chosen = draw(st.lists(st.sampled_from(names), max_size=7, unique=True))
    vocab_size = draw(st.sampled_from([v for v in (17, 300, 2, 3, 5) if v <= largest_vocab]))
    tokens = st.integers(0, vocab_size - 1)
    options: dict[str, Any] = {
        "strategy": strategy,
        "max_new_tokens": draw(st.integers(1, 9)),
        "seed": draw(st.integers(0, 2**31)),
        "eos_token_id": draw(st.sets(tokens, max_size=2).map(sorted)) or None,
        **{name: draw(VALUES[name]) for name in chosen},
    }
    table = draw(st.sampled_from(TABLE_KINDS))
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        if table == "forbidding":  # a forced token may be an impossible one
            options.pop(name, None)
        elif name in options:
            options[name] %= vocab_size
    for name in ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", PREDICTED):
        options[name] = within(options.get(name, []), vocab_size)
    if options.get("no_timestamps_token_id") is None:
        options.pop("max_initial_timestamp_index", None)
        options.pop("last_timestamp_token_id", None)
    else:
        options["no_timestamps_token_id"] %= vocab_size
        first = options["no_timestamps_token_id"] + 1
        if (last := options.get("last_timestamp_token_id")) is not None:
            has_times = first < vocab_size
            options["last_timestamp_token_id"] = (
                first + last % (vocab_size - first) if has_times else None
            )
        options.pop("constraint", None)  # both together are refused
    options["logit_bias"] = {
        token % vocab_size: bias for token, bias in options.get("logit_bias", {}).items()
    }
    eos = tuple(options["eos_token_id"] or ())
    options["constraint"] = constraint_of(options.get("constraint", "none"), vocab_size, eos)
    options["scorers"] = scorers_of(options.get("scorers", ()), vocab_size)
    if options.get("num_beams", 1) > 32:  # a table takes its time
        options["max_new_tokens"] = min(options["max_new_tokens"], 3)
    run = st.lists(tokens, min_size=1, max_size=2).map(tuple)
    stop = tuple(draw(st.lists(run, max_size=3)))
    if stop:
        options["stop_strings"] = "stands for the tokens"
    by_model = STRATEGIES[strategy].has_draft and options.get("drafter") not in ("ngram", "none")
    draft_kinds = DRAFT_KINDS if by_model else (*DRAFT_KINDS, NO_DRAFT, NO_DRAFT)
    draft = draw(st.sampled_from(draft_kinds))
    heads = HEADS if draft != FEATURES else ("full",)  # tables with both are none
    head = draw(st.sampled_from(heads))
    return WholeRequest(
        options=options,
        vocab_size=vocab_size,
        table=table,
        draft=draft,
        table_seed=draw(st.integers(0, 999)),
        prompt=tuple(draw(st.lists(tokens, min_size=1, max_size=5))),
        stop=stop,
        seconds_a_row=draw(st.sampled_from([0.0, 1e-5, 1e-3])),
        head=head,
        num_top=draw(st.sampled_from([12, 1, 9, 20, 2, 5])),
        check=draw(st.sampled_from(CHECKS)),
    )


def within(tokens: Any, vocab_size: int) -> Any:
    """Return token ids, in lists or not, brought into a vocabulary."""
    if isinstance(tokens, list):
        return [within(entry, vocab_size) for entry in tokens]
    return tokens % vocab_size


def constraint_of(kind: str, vocab_size: int, eos: tuple[int, ...]) -> PathConstraint | None:
    """Return a constraint that allows about half of the tokens, and the end of a sequence."""
    if kind == "none":
        return None
    allowed = some_tokens(vocab_size, always=eos)
    if kind == "chains":
        return PathConstraint(vocab_size, chains(vocab_size, eos), eos, ends_after=ends_by_itself)
    if kind == "ending":
        return PathConstraint(vocab_size, allowed, eos, ends_after=ends_by_itself)
    return PathConstraint(vocab_size, allowed, eos, as_bits=kind == "bits")


def scorers_of(largest: Sequence[float], vocab_size: int) -> list[PathScorer]:
    """Return scorers by the largest number that each adds; 0 is known in advance."""
    return [PathScorer(vocab_size, most, has_highest=most == 0.0) for most in largest]


def ends_by_itself(path: tuple[int, ...]) -> bool:
    return len(path) > 2 and (sum(path) + len(path)) % 5 == 0
