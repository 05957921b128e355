"""Random table models: next-token logits that depend on the whole path, made by a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.engine import Engine
from dsbd_forward.forward import Forward, ForwardResult
from dsbd_ort.decoding import DecodeResult, DecodingConfig, TableModel, decode
from dsbd_ort.decoding.batched_decoder import BatchedDecoder, BatchedRequest
from dsbd_ort.decoding.distribution import TopDistributions
from dsbd_ort.decoding.drafting.cost_curve import CostCurve
from dsbd_ort.decoding.engine_call import Role
from dsbd_ort.decoding.joint_distribution import JointDistribution, joint_distribution
from dsbd_ort.decoding.kv_cache import PrefixCache, RowIdentity
from dsbd_ort.decoding.request import DecodingRequest
from dsbd_ort.decoding.result import IterationOutput, result_of
from dsbd_ort.decoding.whole_requests import decode_iterations, decoded_alone

LogitsOf = Callable[[tuple[int, ...]], NDArray[np.floating]]


@dataclass(frozen=True)
class EndsWithAny:
    """A StopState: the path ends when its last tokens are one of ``wanted``."""

    wanted: tuple[tuple[int, ...], ...]
    last: tuple[int, ...] = ()
    has_ended: bool = False

    def extended(self, token: int) -> EndsWithAny:
        last = (*self.last, token)[-max(map(len, self.wanted)) :]
        has_ended = any(last[-len(tokens) :] == tokens for tokens in self.wanted)
        return EndsWithAny(self.wanted, last, self.has_ended or has_ended)


def ends_with(*wanted: tuple[int, ...]) -> EndsWithAny:
    return EndsWithAny(wanted)


def random_table(seed: int, vocab_size: int, spread: float = 1.5) -> LogitsOf:
    """Normal logits of standard deviation ``spread``, independent for every path."""
    cache: dict[tuple[int, ...], NDArray[np.float64]] = {}

    def logits_of(path: tuple[int, ...]) -> NDArray[np.floating]:
        if path not in cache:
            rng = np.random.default_rng([seed, len(path), *path])
            cache[path] = rng.normal(size=vocab_size) * spread
        return cache[path]

    return logits_of


def mixed_table(first: LogitsOf, second: LogitsOf, share: float) -> LogitsOf:
    """``share`` of the first table's logits, the rest of the second's: a draft of some quality."""
    return lambda path: share * first(path) + (1 - share) * second(path)


class TimedTable(TableModel):
    """A table model whose calls take the seconds of a curve on a clock, the first one longer.

    Attributes:
        untimed_rows: calls of this many rows take no time (a prompt).
    """

    untimed_rows: int | None = None

    def __init__(
        self,
        vocab_size: int,
        table: LogitsOf,
        curve: CostCurve,
        clock: list[float],
        opening: float = 0.0,
    ) -> None:
        super().__init__(vocab_size, table)
        self._seconds, self._clock, self._opening = curve.up_to(512), clock, opening

    @property
    def seconds_of_row(self) -> float:
        return float(self._seconds[1])

    def forward(self, forward: Forward) -> ForwardResult:
        if forward.num_new != self.untimed_rows:
            self._clock[0] += float(self._seconds[forward.num_new]) + self._opening
        self._opening = 0.0
        return super().forward(forward)


class Watched:
    """A model that stores the rows of its calls, and fails in one of them if that is asked for."""

    def __init__(self, model: TableModel, failing_call: int | None = None) -> None:
        self.model = model
        self.spec = model.spec
        self.keep = model.keep
        self.most_rows = 0
        self.rows_of_calls: list[int] = []
        self._failing_call = failing_call

    @property
    def num_rows(self) -> int:
        return self.model.num_rows

    def forward(self, forward: Forward) -> ForwardResult:
        self.rows_of_calls.append(forward.num_new)
        if len(self.rows_of_calls) == self._failing_call:
            raise RuntimeError("no memory")
        result = self.model.forward(forward)
        self.most_rows = max(self.most_rows, self.model.num_rows)
        return result


def request_on(
    config: DecodingConfig, prompt: tuple[int, ...] = (1, 0, 1), seed: int = 0, **more: Any
) -> DecodingRequest:
    """A request with its own random numbers; ``more``: other fields of it."""
    rng = np.random.default_rng(seed)
    return DecodingRequest(prompt_ids=prompt, config=config, rng=rng, **more)


def decoded(request: DecodingRequest, target: Engine, draft: Engine | None = None) -> DecodeResult:
    return result_of(decode_iterations(request, target, draft))


def decoded_next(decoder: BatchedDecoder, request: DecodingRequest) -> DecodeResult:
    """Decode a request after the rows that earlier ones left."""
    decoder.keep_for(request)
    return result_of(decoded_alone(decoder, request))


def prefix_of(decoder: BatchedDecoder, role: Role, tokens: Iterable[int]) -> PrefixCache:
    """Return the rows that a path has between two requests."""
    return decoder.caches[role].longest_prefix(RowIdentity([*tokens]))


def outcomes(decoder: BatchedDecoder) -> dict[BatchedRequest, Any]:
    """Run the members of a decoder to their ends; return their results, or errors."""
    found: dict[BatchedRequest, Any] = {}
    while decoder.num_live:
        for progress in decoder.iterate():
            if not isinstance(progress.event, IterationOutput):
                found[progress.live] = progress.event
    return found


def run(
    config: DecodingConfig,
    target: LogitsOf,
    draft: LogitsOf | None,
    vocab_size: int,
    seed: int,
    prompt: tuple[int, ...] = (1, 0, 1),
) -> DecodeResult:
    """Decode on tables; also check that no engine computed a node twice while it was live.

    The rejection coupling drops the descendants of its beams, so there a node may come again.
    """
    target_model = TableModel(vocab_size, target)
    draft_model = TableModel(vocab_size, draft) if draft else None
    result = decode(target_model, draft_model, prompt, config, np.random.default_rng(seed))
    for model in (target_model, draft_model):
        if model and config.coupling != "rejection":
            paths = [path for path in model.computed_paths if len(path) >= len(prompt)]
            assert len(set(paths)) == len(paths), "a node was computed twice"
    return result


def all_tokens(result: DecodeResult) -> list[tuple[list[int], float]]:
    """Tokens and log-probabilities of a result, which equal results share."""
    return [(s.token_ids, round(s.logprob, 6)) for s in result.sequences]


def check_like_dense(found: DecodeResult, dense: DecodeResult) -> None:
    """Compare tokens, and log-probabilities up to the float32 of a head's log-sum."""
    assert [s.token_ids for s in found.sequences] == [s.token_ids for s in dense.sequences]
    for one, other in zip(found.sequences, dense.sequences, strict=True):
        np.testing.assert_allclose(one.token_logprobs, other.token_logprobs, rtol=0, atol=2e-6)


def final_beams(result: DecodeResult) -> tuple[tuple[int, ...], ...]:
    """The returned token sequences as a sorted multiset, the outcomes of ``beam_sampling_law``."""
    return tuple(sorted(tuple(sequence.token_ids) for sequence in result.sequences))


def joint_of(
    nodes: list[int],
    weights: NDArray[np.float64],
    laws: list[tuple[list[int], NDArray[np.float64]] | None],
    copies: list[int] | None = None,
) -> JointDistribution:
    """The joint distribution of beams with these next tokens and probabilities; None has ended."""
    (size,) = {len(law[0]) for law in laws if law}
    given = [law or ([0] * size, np.ones(size)) for law in laws]
    log_probs = np.log(np.array([given[0][1], *(probs for _, probs in given)]))
    tokens = np.array([given[0][0], *(tokens for tokens, _ in given)])
    rows = np.array([row if law else 0 for row, law in enumerate(laws, start=1)])
    distributions = TopDistributions(tokens, log_probs, None)
    each = None if copies is None else np.array(copies)
    return joint_distribution(np.array(nodes), weights, each, distributions, rows)
