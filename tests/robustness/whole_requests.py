"""Whole requests drawn at random, every option beside every other, and what must hold of each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from dsbd_errors import DsbdError
from dsbd_ort.decoding import (
    STRATEGIES,
    DecodedSequence,
    DecodeResult,
    DecodingConfig,
    DecodingStats,
    RequestTrace,
    TableModel,
    WithResult,
    decode_iterations,
)
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.cache_view import PrefixCache
from dsbd_ort.decoding.cost_curve import CostCurve, EngineCosts
from dsbd_ort.decoding.request import DecodingRequest, IterationOutput, most_rows
from dsbd_ort.decoding.throughput import AcceptanceEstimator
from tests.decoding.preempting import together
from tests.decoding.tables import LogitsOf, ends_with, random_table
from tests.decoding.top_table import TopTable

WITHOUT_DRAFT = {  # the strategy that returns the same with a draft policy that changes nothing
    "dsbd": "beam-sample",
    "speculative": "sample",
    "tree-speculative": "sample",
    "speculative-beam-search": "beam-search",
}
TABLE_KINDS = ("smooth", "peaked", "rounded", "equal", "forbidding")
DRAFT_KINDS = ("itself", "mixed", "hostile", "forbidding")
CHECKS = ("candidates", "shared", "preempted", "repeated", "traced", "alone")


@dataclass(frozen=True)
class WholeRequest:
    """A request on tables, and what else is done with it.

    Attributes:
        options: fields of DecodingConfig.
        vocab_size, table, draft, table_seed: the two tables.
        prompt: token ids.
        stop: runs of tokens that end a sequence as a stop string does.
        seconds_a_row: of the target, for draft_policy "throughput".
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
    check: str
    tables: list[LogitsOf] = field(default_factory=list, compare=False, repr=False)

    @property
    def config(self) -> DecodingConfig:
        return DecodingConfig.from_options(self.options).settled(costs_are_known=True)

    def models(self, num_candidates: int = 0, full_chunk: int = 0) -> tuple[Any, Any]:
        """Return target and draft, with a top-k head where ``num_candidates`` is given.

        full_chunk: see TopTable; 0: without full logits.
        """
        if not self.tables:
            target = shaped(random_table(self.table_seed, self.vocab_size), self.table)
            self.tables.extend([target, draft_of(self, target)])
        if num_candidates:
            return tuple(  # type: ignore[return-value]
                TopTable(self.vocab_size, table, num_candidates, full_chunk=full_chunk)
                for table in self.tables
            )
        return tuple(TableModel(self.vocab_size, table) for table in self.tables)  # type: ignore[return-value]

    def request(self, config: DecodingConfig, trace: RequestTrace | None = None) -> DecodingRequest:
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
            estimator=AcceptanceEstimator.initial(),
            trace=trace,
        )


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
    }
    return kinds[request.draft]


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "num_beams": st.sampled_from([1, 2, 3, 4, 7] * 8 + [40, 300, 1024]),
    "coupling": st.sampled_from(["gumbel", "rejection"]),
    "width_policy": st.sampled_from(["fixed", "threshold"]),
    "min_beams": st.integers(1, 3),
    "accept_threshold": st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    "draft_policy": st.sampled_from([None, "fixed", "throughput"]),
    "draft_length": st.integers(0, 4),
    "draft_beams": st.one_of(st.integers(1, 9), st.lists(st.integers(1, 9), max_size=4)),
    "memory": st.sampled_from(["forest", "single"]),
    "replacement": st.booleans(),
    "temperature": st.sampled_from([0.0, 1e-6, 0.5, 1.0, 3.0, 1e3]),
    "top_k": st.sampled_from([0, 1, 2, 5, 400]),
    "top_p": st.sampled_from([1e-9, 0.3, 0.5, 0.9, 0.999, 1.0]),
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
    "early_stopping": ("search",),  # with beams
    "joint_threshold": ("joint",),
    "joint_tokens": ("joint-greedy",),
    "joint_beams": ("joint-greedy",),
}
OF_DRAFT = ("draft_policy", "draft_length", "draft_beams")
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
    vocab_size = draw(st.sampled_from([v for v in (2, 3, 5, 17, 300) if v <= largest_vocab]))
    tokens = st.integers(0, vocab_size - 1)
    options: dict[str, Any] = {
        "strategy": strategy,
        "max_new_tokens": draw(st.integers(1, 9)),
        "seed": draw(st.integers(0, 2**31)),
        "eos_token_id": draw(st.sets(tokens, max_size=2).map(sorted)) or None,
        **{name: draw(VALUES[name]) for name in chosen},
    }
    if options.get("num_beams", 1) > 32:  # a table takes its time
        options["max_new_tokens"] = min(options["max_new_tokens"], 3)
    run = st.lists(tokens, min_size=1, max_size=2).map(tuple)
    stop = tuple(draw(st.lists(run, max_size=3)))
    if stop:
        options["stop_strings"] = "stands for the tokens"
    return WholeRequest(
        options=options,
        vocab_size=vocab_size,
        table=draw(st.sampled_from(TABLE_KINDS)),
        draft=draw(st.sampled_from(DRAFT_KINDS)),
        table_seed=draw(st.integers(0, 999)),
        prompt=tuple(draw(st.lists(tokens, min_size=1, max_size=5))),
        stop=stop,
        seconds_a_row=draw(st.sampled_from([0.0, 1e-5, 1e-3])),
        check=draw(st.sampled_from(CHECKS)),
    )


def check_whole_request(request: WholeRequest) -> bool:
    """Decode a request on tables and hold it against what must be true; False: it is refused."""
    try:
        config = request.config
    except DsbdError as error:
        assert 10 < len(str(error)) < 600, error
        return False
    result, steps = decoded(request, config)
    check_result(result, config, request)
    check_stream(steps, result)
    if (plain := config_without_draft(config)) is not None:
        assert contents(decoded(request, plain)[0]) == contents(result), "a draft was visible"
    again = AGAIN[request.check](request, config)
    if again is not None:
        assert [s.token_ids for s in again.sequences] == [s.token_ids for s in result.sequences]
        for ours, theirs in zip(again.sequences, result.sequences, strict=True):
            np.testing.assert_allclose(ours.token_logprobs, theirs.token_logprobs, atol=1e-3)
    return True


def decoded(
    request: WholeRequest,
    config: DecodingConfig,
    models: tuple[Any, Any] | None = None,
    prefixes: tuple[PrefixCache, PrefixCache] | None = None,
    trace: RequestTrace | None = None,
) -> tuple[DecodeResult, list[IterationOutput]]:
    target, draft = models or request.models()
    asked = request.request(config, trace)
    loop = decode_iterations(
        target,
        draft,
        asked.prompt_ids,
        config,
        asked.rng,
        stop=asked.stop,
        costs=asked.costs,
        estimator=asked.estimator,
        prefixes=prefixes,
        trace=trace,
    )
    outputs = WithResult(loop)
    steps = list(outputs)
    return outputs.result, steps


def check_result(result: DecodeResult, config: DecodingConfig, request: WholeRequest) -> None:
    sequences = result.sequences
    num_wanted = config.num_return_sequences
    assert 1 <= len(sequences) <= num_wanted
    assert [s.score for s in sequences] == sorted((s.score for s in sequences), reverse=True)
    if not config.replacement:
        assert len({tuple(s.token_ids) for s in sequences}) == len(sequences), "a beam came twice"
    for sequence in sequences:
        check_sequence(sequence, config, request)
    check_stats(result.stats, config, request)
    scored = result.prompt_logprobs
    assert (scored is not None) is config.prompt_logprobs
    assert scored is None or len(scored.token_logprobs) == len(request.prompt)


def check_sequence(
    sequence: DecodedSequence, config: DecodingConfig, request: WholeRequest
) -> None:
    ids = sequence.token_ids
    assert 1 <= len(ids) <= config.max_new_tokens
    assert len(sequence.token_logprobs) == len(ids)
    assert all(math.isfinite(p) and p <= 0.0 for p in sequence.token_logprobs), (
        "an impossible token"
    )
    check_top_logprobs(sequence, config, request)
    assert math.isclose(sequence.logprob, sum(sequence.token_logprobs), abs_tol=1e-9)
    assert math.isclose(
        sequence.score, sequence.logprob / len(ids) ** config.length_penalty, abs_tol=1e-9
    )
    ends = [i for i, token in enumerate(ids) if token in config.eos_ids]
    stops = [
        end
        for end in range(1, len(ids) + 1)
        if any(tuple(ids[:end][-len(run) :]) == run for run in request.stop)
    ]
    first_end = min([*(i + 1 for i in ends), *stops], default=None)
    assert first_end in (None, len(ids)), "tokens after the end"
    reason = "eos" if ends else "stop" if stops else "length"
    assert sequence.finish_reason == reason
    if reason == "length":
        assert len(ids) == config.max_new_tokens


def check_top_logprobs(
    sequence: DecodedSequence, config: DecodingConfig, request: WholeRequest
) -> None:
    if not config.top_logprobs:
        assert sequence.top_logprobs is None
        return
    assert sequence.top_logprobs is not None
    number = min(config.top_logprobs, request.vocab_size)
    for token, own, top in zip(
        sequence.token_ids, sequence.token_logprobs, sequence.top_logprobs, strict=True
    ):
        assert len({each for each, _ in top}) == number
        logprobs = [logprob for _, logprob in top]
        np.testing.assert_array_less(np.diff(np.maximum(logprobs, -1e9)), 1e-5)
        assert dict(top).get(token, own) == own <= logprobs[0] + 1e-5


def check_stats(stats: DecodingStats, config: DecodingConfig, request: WholeRequest) -> None:
    values = dataclasses.asdict(stats)
    for name, value in values.items():
        if isinstance(value, int | float):
            assert math.isfinite(value) and value >= 0, name
    assert sum(stats.acceptance_histogram) == stats.num_iterations
    if not config.row.has_draft:
        assert stats.draft_calls == stats.draft_rows == 0
    assert stats.num_prompt_tokens == len(request.prompt)
    assert 0.0 < stats.mean_beam_width <= max(config.width, config.joint_beams or 1)


def check_stream(steps: list[IterationOutput], result: DecodeResult) -> None:
    best, shown = result.sequences[0].token_ids, 0
    for step in steps:
        agreed = step.agreed_tokens
        assert agreed == best[: len(agreed)], "a streamed token was taken back"
        assert len(agreed) >= shown
        shown = len(agreed)


def config_without_draft(config: DecodingConfig) -> DecodingConfig | None:
    """Return what must give the same without a draft, None where the draft may be seen."""
    plain = WITHOUT_DRAFT.get(config.strategy)
    is_seen = (
        config.coupling == "rejection"
        or config.width_policy == "threshold"
        or config.memory == "single"
        or (config.replacement and config.width == 1)  # one draw has nothing to replace
    )
    if plain is None or is_seen:
        return None
    return DecodingConfig(
        strategy=plain,
        num_beams=config.num_beams,
        replacement=config.replacement,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        num_return_sequences=config.num_return_sequences,
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
        stop_strings=config.stop_strings,
        eos_token_id=config.eos_token_id,
    )


def contents(result: DecodeResult) -> list[tuple[list[int], float, str]]:
    return [(s.token_ids, round(s.logprob, 5), s.finish_reason) for s in result.sequences]


def with_candidates(request: WholeRequest, config: DecodingConfig) -> DecodeResult | None:
    """Decode on models with a top-k head, of no more candidates than it takes."""
    if config.row.rule == "search":
        per_beam = max(2, 1 + len(config.eos_ids))
        top_k = max(config.width * per_beam, config.most_draft_beams + len(config.eos_ids))
    else:
        top_k = config.top_k
    # Equal candidates or equal scores of sequences are tipped by a float32 logsumexp.
    has_equal_scores = config.width > 1 and request.table in ("equal", "rounded")
    has_ties = has_equal_scores or (config.row.rule == "search" and request.table != "smooth")
    if not 1 <= top_k <= request.vocab_size or request.table == "forbidding" or has_ties:
        return None
    if config.prompt_logprobs or config.top_logprobs:  # see tests/decoding/test_top_tokens.py
        return None
    if config.row.rule == "search":  # reads what fewer candidates leave out
        fewer = 1 + request.table_seed % top_k
        return decoded(request, config, request.models(fewer, 1 + request.table_seed % 40))[0]
    return decoded(request, config, request.models(top_k))[0]


def with_others(request: WholeRequest, config: DecodingConfig) -> DecodeResult:
    """Decode beside a twin that came first and one that leaves half-way; check the rows held."""
    forest = BatchedDecoder(*request.models())
    asked = request.request(config)
    early, late = forest.join(request.request(config)), None
    leaver = forest.join(request.request(config))
    outcome = None
    held = [0, 0]
    for iteration in range(10_000):
        if iteration == 1:
            late = forest.join(asked)
        if iteration == 2:
            forest.leave(leaver)
        for progress in forest.iterate():
            assert not isinstance(progress.event, Exception), progress.event
            if progress.tree is late and isinstance(progress.event, DecodeResult):
                outcome = progress.event
        for tree in (early, late):
            if tree is not None:
                held = [
                    max(h, view.num_rows) for h, view in zip(held, tree.views.values(), strict=True)
                ]
        if iteration > 1 and forest.num_trees == 0:
            break
    assert max(held) <= most_rows(len(request.prompt), config), "more rows than were reserved"
    assert outcome is not None
    return outcome


def preempted(request: WholeRequest, config: DecodingConfig) -> DecodeResult:
    """Decode beside two older twins in a cache that is too small for them."""
    max_rows = len(request.prompt) + config.width * (2 + request.table_seed % 9)
    forest = BatchedDecoder(*request.models(), max_rows=max_rows)
    twins = [request.request(config) for _ in range(3)]
    return together(forest, twins, request.table_seed).result(2)


def again_on_the_same_caches(request: WholeRequest, config: DecodingConfig) -> DecodeResult:
    """Give a request up half-way, then decode it on what the caches still hold."""
    models = request.models()
    prefixes = PrefixCache(), PrefixCache()
    asked = request.request(config)
    begun: Iterator[IterationOutput] = decode_iterations(
        *models,
        asked.prompt_ids,
        config,
        asked.rng,
        stop=asked.stop,
        costs=asked.costs,
        estimator=asked.estimator,
        prefixes=prefixes,
    )
    next(begun, None)
    begun.close()  # type: ignore[attr-defined]
    return decoded(request, config, models, prefixes)[0]


def traced(request: WholeRequest, config: DecodingConfig) -> DecodeResult:
    trace = RequestTrace()
    return decoded(request, config, trace=trace)[0]


AGAIN = {
    "candidates": with_candidates,
    "shared": with_others,
    "preempted": preempted,
    "repeated": again_on_the_same_caches,
    "traced": traced,
    "alone": lambda request, config: decoded(request, config)[0],
}
