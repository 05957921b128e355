"""Requests with several sources in shared engine calls: each gets what it gets alone."""

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import dsbd_ort
from dsbd_forward.forward import Forward, RowSources
from dsbd_ort.decoding import DecodeResult
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.whole_requests import decoded_together
from dsbd_ort.engine import Service
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.source.sources import Sources
from tests.encoder_decoder_pair import some_sources
from tests.robustness.preempting import ForcedPreemptions

NUM_TOGETHER = 8


class WatchedEngine:
    """An engine, and the number of the sources of each of its forwards."""

    def __init__(self, engine):
        self._engine = engine
        self.spec = engine.spec
        self.num_sources = []

    @property
    def num_rows(self):
        return self._engine.num_rows

    @property
    def num_free_rows(self):
        return self._engine.num_free_rows

    def forward(self, forward):
        self.num_sources.append(len(forward.row_sources.distinct))
        return self._engine.forward(forward)

    def keep(self, rows):
        self._engine.keep(rows)

    def read_source(self, source):
        self._engine.read_source(source)

    def release_source(self, source):
        self._engine.release_source(source)


STRATEGIES = [
    {"strategy": "greedy"},
    {"strategy": "beam-search", "num_return_sequences": 4},
    {"strategy": "speculative-beam-search", "draft_length": 3, "num_return_sequences": 4},
    {"strategy": "speculative-beam-search", "drafter": "ngram", "draft_length": 3},
    {"strategy": "sample"},
    {"strategy": "speculative", "draft_length": 3},
    {"strategy": "tree-speculative", "draft_length": 2, "draft_beams": 2},
    {"strategy": "beam-sample", "num_beams": 3, "num_return_sequences": 3},
    {"strategy": "dsbd", "num_beams": 3, "draft_length": 2, "num_return_sequences": 3},
    {"strategy": "mjsd", "draft_length": 2},
    {"strategy": "mjgd"},
]


def tokens(result):
    return [sequence.token_ids for sequence in result.sequences]


def prepared(pipe, sources, options):
    return [
        pipe.prepare(source, {"seed": seed, **each})
        for seed, (source, each) in enumerate(zip(sources, options, strict=True))
    ]


def check_together(pipe, sources, options):
    """Requests alone, together, and preempted by force; return the sources of each target call."""
    alone = [
        pipe.generate(source, seed=seed, **each)
        for seed, (source, each) in enumerate(zip(sources, options, strict=True))
    ]
    with pipe.models.engines() as (target, draft):
        target.keep(np.arange(0))
        watched = WatchedEngine(target)
        requests = prepared(pipe, sources, options)
        together = decoded_together(BatchedDecoder(watched, draft), requests, NUM_TOGETHER)
        for wanted, found in zip(alone, together, strict=True):
            assert tokens(found) == tokens(wanted)
            for ours, theirs in zip(found.sequences, wanted.sequences, strict=True):
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        requests = [
            replace(request, preempts=ForcedPreemptions(seed))
            for seed, request in enumerate(prepared(pipe, sources, options))
        ]
        preempted = decoded_together(BatchedDecoder(target, draft), requests, NUM_TOGETHER)
        assert [tokens(result) for result in preempted] == [tokens(result) for result in alone]
    return watched.num_sources


def test_all_strategies_and_long_and_short_sources_in_the_same_calls(source_pipe):
    """Of two sources there are two requests, of one of them in the same strategy."""
    rng = np.random.default_rng(7)
    lengths = (1, 250, 3, 17, 40, 16, 90, 2, 30)
    sources = [[*rng.integers(3, 290, length).tolist(), 1] for length in lengths]
    sources += [sources[0], sources[8]]
    num_sources = check_together(source_pipe, sources, STRATEGIES)
    assert max(num_sources) > 3


@pytest.mark.long
@pytest.mark.parametrize("options", STRATEGIES, ids=lambda options: options["strategy"])
def test_two_hundred_sources_together(options, source_pipe):
    sources = some_sources(200)
    check_together(source_pipe, sources, [options] * len(sources))


def test_equal_rows_of_two_sources_in_one_call(source_pipe):
    """Each finds the logits of its own source, wherever its rows stand in the call."""
    first, second = (tuple(source) for source in some_sources(2))
    token_ids, size = np.array([2, 7, 50, 60, 70]), 5

    def chain(number):
        return {
            "token_ids": np.tile(token_ids, number),
            "positions": np.tile(np.arange(size), number),
            "mask": np.kron(np.eye(number, dtype=np.bool_), np.tri(size, dtype=np.bool_)),
            "logit_rows": np.arange(number * size),
        }

    with source_pipe.models.engines() as (target, _):
        alone = []
        for source in (first, second):
            target.keep(np.arange(0))
            alone.append(target.forward(Forward(**chain(1), source=source)).logits.values)
        assert abs(alone[0] - alone[1]).max() > 1e-2
        for order in ((0, 1), (1, 0), (0, 1, 0), (1, 0, 0, 1)):
            target.keep(np.arange(0))
            sources = RowSources((first, second), np.repeat(order, size))
            found = target.forward(Forward(**chain(len(order)), sources=sources)).logits.values
            for place, number in enumerate(order):
                rows = found[place * size : (place + 1) * size]
                assert np.allclose(rows, alone[number], atol=1e-5)
        mixed = np.array([0, 1, 0, 1, 1, 1, 0, 1, 0, 0])  # rows of both between each other
        order = mixed.argsort(kind="stable")
        both = chain(2)
        together = Forward(
            both["token_ids"][order.argsort()],
            both["positions"][order.argsort()],
            both["mask"][order.argsort()][:, order.argsort()],
            both["logit_rows"],
            sources=RowSources((first, second), mixed),
        )
        target.keep(np.arange(0))
        found = target.forward(together).logits.values
        for number in (0, 1):
            assert np.allclose(found[mixed == number], alone[number], atol=1e-5)
        target.keep(np.arange(0))


def test_rows_of_sources_are_counted_and_given_back(source_pipe):
    sources = [[5] * length + [1] for length in (9, 30, 99, 14)]
    bytes_of_token = 3 * 2 * 4 * 8 * 4
    with source_pipe.models.engines() as (target, draft):
        target.keep(np.arange(0))
        empty = target.kv_bytes
        target.reset_peak()
        options = [{"strategy": "greedy", "max_new_tokens": 4}] * 4
        decoded_together(BatchedDecoder(target, draft), prepared(source_pipe, sources, options), 4)
        wanted = 4 * 112 * bytes_of_token  # slots as long as the longest, rounded up
        assert target.kv_bytes - empty == wanted
        assert target.kv_bytes_peak - empty == wanted
        target.keep(np.arange(0))
        assert target.kv_bytes == empty


def test_few_sources_fit_the_memory_at_a_time(source_pipe, monkeypatch):
    """Calls are cut where their sources take too much; what is returned stays the same."""
    sources = some_sources(7)
    options = [STRATEGIES[1]] * len(sources)
    with source_pipe.models.engines() as (target, _):
        slots = target.part(Sources).slots
        monkeypatch.setattr(slots, "_most_bytes", 3 * 48 * 768)
        target.keep(np.arange(0))
        assert slots.most_together([tuple(source) for source in sources]) == 4
    check_together(source_pipe, sources, options)
    with source_pipe.models.engines() as (target, _):
        assert slots.capacity[0] <= 4
        monkeypatch.undo()
        target.keep(np.arange(0))


def test_a_source_that_is_refused_ends_no_other_request(source_pipe):
    """The engine itself refuses one: ``Pipeline.prepare`` would have refused the token 300."""
    sources = some_sources(3)
    wanted = [tokens(source_pipe.generate(source, seed=0)) for source in sources]
    ended = {}
    with source_pipe.models.engines() as models:
        decoder = BatchedDecoder(*models)
        asked = [source_pipe.prepare(source, {"seed": 0}) for source in sources]
        asked.insert(1, dataclasses.replace(asked[0], source=(300, 1)))
        index_by_member = {decoder.join(request): index for index, request in enumerate(asked)}
        while decoder.num_live:
            for progress in decoder.iterate():
                if isinstance(progress.event, DecodeResult | BaseException):
                    ended[index_by_member[progress.live]] = progress.event
    assert isinstance(ended[1], InputError) and "the token 300" in str(ended[1])
    assert [tokens(ended[index]) for index in (0, 2, 3)] == wanted


def test_a_service_with_several_sources(source_pipe, source_pair):
    sources = some_sources(12)
    wanted = [tokens(source_pipe.generate(source, seed=0)) for source in sources]
    with (
        dsbd_ort.Pipeline.from_bundle(source_pair / "bundle", num_threads=1) as own,
        Service(own) as service,
        ThreadPoolExecutor(6) as pool,
    ):
        asked = itertools.chain(sources, sources)
        found = list(pool.map(lambda source: tokens(service.generate(source, seed=0)), asked))
    assert found == wanted + wanted
