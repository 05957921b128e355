"""Whole requests on tables, drawn at random, by the loop in numpy and by the loop in C++.

    python -m tests.native.table_requests NUMBER SEED

prints how many were decoded, and fails at the first case in which the loops differ in any bit that
is returned, or in any engine call: each of some requests on engines that they share, alone or
together.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings

from dsbd_errors import DsbdError
from dsbd_forward.forward import Forward, ForwardResult
from dsbd_ort import TokenTrie
from dsbd_ort.decoding import STRATEGIES, DecodeResult, DecodingConfig
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.decoder import Decoder, LiveRequest, Preempted, Progress
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.ngram import NGramPool
from dsbd_ort.decoding.native_decoder import NativeDecoder
from dsbd_ort.decoding.request import DecodingRequest
from dsbd_ort.decoding.result import IterationOutput
from dsbd_ort.decoding.top_tokens import TokenLogprobs
from tests.robustness.whole_requests import FEATURES, NO_DRAFT, WholeRequest, whole_requests

STATS = (
    *("num_iterations", "num_draft_tokens", "num_accepted_tokens", "num_draft_layers"),
    *("num_accepted_layers", "acceptance_histogram", "target_rows", "target_calls"),
    *("draft_rows", "draft_calls", "drafter", "num_cached_tokens"),
)
UNSUPPORTED = ("logits_processors", "scorers", "constraint")  # a trie may come instead
MOST_BEAMS = 40
DRAWING = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    phases=[Phase.generate],
)
MANY = 10  # one request in so many has a long prompt, and one a large vocabulary
WHOLE = 700  # tokens of a large vocabulary
WIDE = (2100, 6000)  # of larger ones: rows are summed, sorted and searched in several other ways
PORTABLE = {"NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR"}
"""With AVX-512 numpy has an exp and a log of its own for float64, which round otherwise."""
NOT_OF_LOGITS = (
    *("strategy", "num_beams", "coupling", "width_policy", "min_beams", "accept_threshold"),
    *("drafter", "draft_policy", "draft_length", "draft_beams", "memory", "replacement"),
    *("temperature", "num_return_sequences", "length_penalty", "early_stopping", "joint_threshold"),
    *("joint_tokens", "joint_beams", "max_new_tokens", "seed", "eos_token_id"),
)
"""Options of requests that leave all tokens of the vocabulary as they are."""


def check_portable() -> None:
    """Refuse a numpy whose exp of float64 is not the C library's, as with AVX-512."""
    numbers = np.linspace(-40.0, 0.0, 1000)
    if np.exp(numbers).tolist() != [math.exp(number) for number in numbers]:
        sys.exit("numpy has an exp of its own; set NPY_DISABLE_CPU_FEATURES for this version")


def drawn_requests(number: int, seed_number: int) -> Iterator[WholeRequest]:
    """Yield requests of all strategies, without what the native library does not have."""
    each = -(-number // len(STRATEGIES))
    drawn = [requests_of(strategy, each, seed_number) for strategy in STRATEGIES]
    for requests in itertools.zip_longest(*drawn):
        yield from (supported(request) for request in requests if request is not None)


def requests_of(strategy: str, number: int, seed_number: int) -> list[WholeRequest]:
    found: list[WholeRequest] = []

    @seed(seed_number)
    @settings(DRAWING, max_examples=number)
    @given(request=whole_requests(strategy))
    def draws(request: WholeRequest) -> None:
        found.append(request)

    draws()
    return found


def supported(request: WholeRequest) -> WholeRequest:
    options = {name: v for name, v in request.options.items() if name not in UNSUPPORTED}
    options["num_beams"] = min(options.get("num_beams", 1), MOST_BEAMS)
    if not STRATEGIES[options["strategy"]].has_beams:
        options.pop("num_beams")
    options["logit_bias"] = list(options.get("logit_bias", {}).items())
    return replace(request, options=options, tables=[])


class Recorded:
    """A model whose clock goes on with its calls, and how many rows each call had."""

    def __init__(self, model: Any, clock: list[float], context: int | None = None) -> None:
        self.model, self.keep = model, model.keep
        self.spec = replace(model.spec, context_length=context)
        self._clock = clock
        self.rows_of_calls: list[int] = []

    @property
    def num_rows(self) -> int:
        return self.model.num_rows

    def forward(self, forward: Forward) -> ForwardResult:
        length = self.spec.context_length
        assert length is None or forward.positions.max() < length, "beyond the context"
        self.rows_of_calls.append(forward.num_new)
        self._clock[0] += 1e-3 + 1e-5 * forward.num_new
        return self.model.forward(forward)


@dataclass
class Case:
    """Requests on the tables of the first one."""

    number: int
    requests: list[WholeRequest]
    max_rows: int | None = None
    pool: int | None = None
    admits: list[bool] = field(default_factory=lambda: [True])
    preempts: list[bool] | None = None
    tries: dict[int, TokenTrie] = field(default_factory=dict)
    context: int | None = None  # of the draft
    has_begin_token: bool = False  # the first token of each prompt

    def outcome(self, kind: Callable[..., Decoder]) -> dict[str, Any]:
        """Return what a kind of decoder makes of the case."""
        clock = [0.0]
        target, draft = self.requests[0].models()
        target, draft = Recorded(target, clock), draft and Recorded(draft, clock, self.context)
        self._decoder = kind(target, draft, max_rows=self.max_rows, clock=lambda: clock[0])
        self._pool = None if self.pool is None else NGramPool(self.pool)
        self._clock = clock
        self._members: dict[int, LiveRequest] = {}
        self._outcomes: list[dict[str, Any]] = [{"agreed": []} for _ in self.requests]
        self._decode()
        return {
            "outcomes": self._outcomes,
            "target_calls": target.rows_of_calls,
            "draft_calls": draft.rows_of_calls if draft else [],
        }

    def _decode(self) -> None:
        admits = itertools.cycle(self.admits)
        waiting = deque(range(len(self.requests)))
        running: set[int] = set()
        while waiting or running:
            while waiting and (not running or next(admits)):
                number = waiting.popleft()
                if self._admit(number):
                    running.add(number)
            for progress in self._decoder.iterate():
                (number,) = (n for n, each in self._members.items() if each is progress.live)
                if isinstance(progress.event, IterationOutput):
                    self._outcomes[number]["agreed"].append(len(progress.event.agreed_tokens))
                    continue
                running.remove(number)
                if isinstance(progress.event, Preempted):
                    waiting.appendleft(number)
                else:
                    self._outcomes[number].update(outcome_of(progress))

    def _admit(self, number: int) -> bool:
        try:
            if number in self._members:
                self._decoder.resume(self._members[number])
            else:
                self._members[number] = self._decoder.join(self._request(number))
        except DsbdError as error:
            self._outcomes[number]["error"] = str(error)
            return False
        return True

    def _request(self, number: int) -> DecodingRequest:
        given, clock = self.requests[number], self._clock
        config = config_of(given, self.tries.get(number))
        request = given.request(config, preempts=self._pattern())
        begin = given.prompt[0] if self.has_begin_token else None
        agreement = [None, 0.5, 0.9][len(given.prompt) % 3]  # measured with the pair
        return replace(
            request,
            clock=lambda: clock[0],
            ngram_pool=self._pool,
            begin_token=begin,
            estimator=AcceptanceEstimator.of_pair(agreement),
        )

    def _pattern(self) -> Any:
        if self.preempts is None:
            return None
        flags = iter(self.preempts)
        return lambda call: next(flags, False)


def config_of(request: WholeRequest, trie: TokenTrie | None = None) -> DecodingConfig:
    options = {**request.options, **({} if trie is None else {"constraint": trie})}
    options["logit_bias"] = dict(options["logit_bias"])
    return DecodingConfig(**options).settled(costs_are_known=True)


def outcome_of(progress: Progress) -> dict[str, Any]:
    result = progress.event
    if isinstance(result, DsbdError):
        return {"error": str(result)}
    if isinstance(result, BaseException):
        raise result
    assert isinstance(result, DecodeResult)
    stats, scored = result.stats, result.prompt_logprobs
    return {
        "sequences": [
            {
                "token_ids": sequence.token_ids,
                "token_logprobs": bits(sequence.token_logprobs),
                "logprob": bits(sequence.logprob),
                "score": bits(sequence.score),
                "finish_reason": sequence.finish_reason,
                "top_logprobs": [shown(each) for each in sequence.top_logprobs or []],
            }
            for sequence in result.sequences
        ],
        "stats": {
            **{name: getattr(stats, name) for name in STATS},
            **{name: bits(getattr(stats, name)) for name in ("mean_beam_width", "tokens_per_s")},
        },
        "prompt_logprobs": scored
        and {
            "token_logprobs": bits(scored.token_logprobs),
            "top_logprobs": [each and shown(each) for each in scored.top_logprobs or []],
        },
    }


def bits(number: Any) -> Any:
    """Return the bits of a float, or of each in a list, as integers."""
    if isinstance(number, list):
        return [bits(each) for each in number]
    if number is None:
        return None
    return struct.unpack("<q", struct.pack("<d", number))[0]


def shown(tops: TokenLogprobs) -> list[Any]:
    return [[token, bits(logprob)] for token, logprob in tops]


def cases_of(requests: Iterable[WholeRequest], rng: np.random.Generator) -> Iterator[Case]:
    """Yield each request alone, preempted by force or not, or together with others."""
    waiting: dict[int, list[WholeRequest]] = {}
    numbers = itertools.count()
    for request in requests:
        is_long = rng.integers(4) == 0
        if is_long:
            request = with_long_path(request, rng)
        elif rng.integers(MANY) == 0:
            prompt = rng.integers(request.vocab_size, size=rng.integers(250, 600))
            request = replace(request, prompt=tuple(prompt.tolist()), tables=[])
        if not is_long and rng.integers(MANY) == 0:
            request = with_whole_layers(request)
        elif not is_long and rng.integers(MANY) == 0:
            request = replace(request, vocab_size=int(rng.choice(WIDE)), tables=[])
        if rng.integers(2):
            preempts = (rng.random(40) < 0.3).tolist() if rng.integers(2) else None
            case = Case(next(numbers), [request], preempts=preempts)
            yield with_context(with_tries(case, rng), rng)
            continue
        group = waiting.setdefault(request.vocab_size, [])
        group.append(request)
        if len(group) > rng.integers(1, 5):
            case = together(next(numbers), waiting.pop(request.vocab_size), rng)
            yield with_context(with_tries(case, rng), rng)
    for group in waiting.values():
        yield with_context(with_tries(together(next(numbers), group, rng), rng), rng)


def with_long_path(request: WholeRequest, rng: np.random.Generator) -> WholeRequest:
    """Return a request of which a draft may read the end, on tables that look at little more."""
    prompt = rng.integers(request.vocab_size, size=rng.integers(20, 200)).tolist()
    found = replace(request, prompt=tuple(prompt), options=dict(request.options), tables=[])
    drawn = {
        "num_beams": int(rng.choice([1, 2, 4])),
        "draft_policy": ["fixed", "throughput"][rng.integers(2)],
        "draft_context": [1, 2, 4, 8, "all", "auto"][rng.integers(6)],
    }
    for name, value in drawn.items():
        before = dict(found.options)
        found.options[name] = value
        try:
            config_of(found)
        except DsbdError:  # it means nothing here
            found = replace(found, options=before)
    if found.options.get("num_beams", 1) <= 4:
        found.options["max_new_tokens"] = int(rng.integers(1, 40))
    found.models()
    found.tables[:] = [lambda path, table=table: table(path[-3:]) for table in found.tables]
    return found


def with_context(case: Case, rng: np.random.Generator) -> Case:
    """Let the draft have few positions, or the prompts a begin token, which may be in each."""
    if case.requests[0].draft != FEATURES and rng.integers(2):
        case.context = int(rng.choice([6, 12, 24, 100]))
    case.has_begin_token = bool(rng.integers(2))
    return case


def with_whole_layers(request: WholeRequest) -> WholeRequest:
    """Return a request whose beams may be continued by any of many tokens."""
    options = {name: v for name, v in request.options.items() if name in NOT_OF_LOGITS}
    options["logit_bias"] = []
    return replace(request, options=options, vocab_size=WHOLE, head="full", tables=[])


def together(number: int, group: list[WholeRequest], rng: np.random.Generator) -> Case:
    """Return a case of requests whose prompts may begin alike, in a cache that may be small."""
    first = group[0]
    if first.draft == NO_DRAFT:
        first = replace(first, draft="mixed", tables=[])
    others = [
        replace(each, prompt=first.prompt + each.prompt) if rng.integers(2) else each
        for each in group[1:]
    ]
    return Case(
        number,
        [first, *others],
        max_rows=int(rng.integers(20, 200)) if rng.integers(2) else None,
        pool=int(rng.integers(10, 200)) if rng.integers(2) else None,
        admits=[*(rng.random(7) < 0.5).tolist(), True],
    )


def with_tries(case: Case, rng: np.random.Generator) -> Case:
    """Constrain some of the requests that may be."""
    for number, request in enumerate(case.requests):
        if rng.integers(4) or request.options.get("no_timestamps_token_id") is not None:
            continue
        eos = request.options["eos_token_id"] or []  # a constraint never lists them
        tokens = np.setdiff1d(np.arange(request.vocab_size), eos)
        if not len(tokens):
            continue
        lengths = rng.integers(1, 6, size=rng.integers(1, 12))
        sequences = [rng.choice(tokens, size=n).tolist() for n in lengths]
        end = "eos" if eos and rng.integers(2) else "leaf"
        case.tries[number] = TokenTrie.from_sequences(sequences, end=end)
    return case


def is_valid(request: WholeRequest) -> bool:
    try:
        config_of(request)
    except DsbdError:
        return False
    return True


def without_texts(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return an outcome without the texts of its errors, which name options as each loop does."""
    each = [{**one, "error": "error" in one} for one in outcome["outcomes"]]
    return {**outcome, "outcomes": each}


def main(number: int, seed_number: int) -> None:
    check_portable()
    valid = [request for request in drawn_requests(number, seed_number) if is_valid(request)]
    num_decoded = 0
    for case in cases_of(valid, np.random.default_rng(seed_number)):
        expected, found = (
            without_texts(case.outcome(kind)) for kind in (BatchedDecoder, NativeDecoder)
        )
        num_decoded += sum(not each["error"] for each in expected["outcomes"])
        if found != expected:
            requests = [vars(request) for request in case.requests]
            print(json.dumps({"case": case.number, "expected": expected, "found": found}))
            sys.exit(f"case {case.number} differs: {requests}")
    print(json.dumps({"num_decoded": num_decoded}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
