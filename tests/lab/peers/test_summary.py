"""Statistics of rows, bars and searches that return all beams, by hand."""

from dataclasses import asdict, replace
from functools import partial
from math import inf

import numpy as np
import pytest

from lab.peers.report import with_logprobs
from lab.peers.retrieval import WIDTHS, retrieval_bars, retrieval_peers
from lab.peers.rounds import Prompt
from lab.peers.searches import broken_checks, score_difference
from lab.peers.summary import Bar, Requests
from tests.lab.peers.samples import peer_of, request_of, run_of

RUN = replace(run_of("theirs"), counterpart="ours", same_tokens_as="ours")
BAR = Bar(ours="ours", peer="fake", run="theirs", precision="fp32", aim=2.0)


def requests():
    """Ours takes 1 s for 2 tokens; theirs 2, 4 and 4 s, and once says something else."""
    theirs = [(2.0, (1, 2)), (4.0, (1, 2)), (4.0, (1, 3))]
    return Requests(
        [
            *(request_of("we", "ours", 1.0, index=i) for i in range(3)),
            request_of("we", "ours", 9.0, index=0, number=1),
            request_of("we", "ours", 0.001, index=0, precision="int8"),
            *(request_of("fake", "theirs", s, t, index=i) for i, (s, t) in enumerate(theirs)),
        ],
        ours="we",
    )


def test_a_row_is_compared_pair_by_pair():
    row = requests().row(peer_of(RUN), RUN, None)
    assert (row.tokens_per_s.median, row.num_tokens) == (0.5, 2.0)
    assert row.tokens_per_s.quartile_3 == pytest.approx(0.75)
    assert (row.ratio.value, row.ratio.low, row.ratio.high) == (4.0, 2.0, 4.0)
    assert (row.num_identical, row.num_requests) == (2, 3)
    assert row.peak_bytes == 10**6
    assert (row.version, row.settings, row.reason) == ("1.2", "counting", None)


def test_a_row_without_counterpart_has_no_ratio():
    row = requests().row(peer_of(RUN), replace(RUN, counterpart=None, same_tokens_as=None), None)
    assert row.ratio is None and row.num_identical is None
    assert row.tokens_per_s.median == 0.5


def test_a_row_that_failed_has_its_reason_and_no_numbers():
    row = requests().row(peer_of(RUN), RUN, "failed: out of memory")
    assert (row.reason, row.tokens_per_s, row.ratio) == ("failed: out of memory", None, None)
    row = requests().row(peer_of(RUN), replace(RUN, precision="int8"), None)
    assert row.reason == "not measured"


def test_a_bar_is_the_same_ratio_or_nothing():
    assert requests().bar(BAR).ratio.value == 4.0
    assert requests().bar(replace(BAR, run="absent")).ratio is None
    assert requests().bar(replace(BAR, ours="absent")).ratio is None


def test_a_row_counts_valid_documents_and_tokens_of_an_iteration():
    of_theirs = partial(request_of, "fake", "theirs", 1.0, (1, 2, 3))
    one, other = (of_theirs(i, is_valid=not i, num_iterations=1 + 2 * i) for i in range(2))
    found = Requests([one, other], ours="we")
    row = found.row(peer_of(RUN), RUN, None)
    assert (row.num_valid, row.num_requests, row.tokens_per_iteration) == (1, 2, 1.5)


def test_a_row_is_compared_with_the_same_tool_without_a_draft():
    drafted = replace(RUN, name="drafted", undrafted="theirs")
    runs = (("fake", "theirs", 3.0), ("we", "theirs", 100.0), ("fake", "drafted", 1.5))
    found = Requests([request_of(*each) for each in runs], ours="we")
    row = found.row(peer_of(RUN), drafted, None)
    assert (row.speedup.value, row.tokens_per_iteration) == (2.0, None)


SEARCH = replace(run_of("theirs"), counterpart="ours", same_search_as="ours")
FOUND = [[1, 2], [3, 4]]


def search(peer, run, seconds, sequences=FOUND, scores=(-1.0, -2.0), num_legal=2, index=0):
    given = None if scores is None else list(scores)
    more = {"sequences": sequences, "scores": given, "num_legal": num_legal}
    return request_of(peer, run, seconds, sequences[0], index, **more)


@pytest.mark.parametrize(
    ("sequences", "scores", "difference"),
    [
        (FOUND, (-1.0, -2.0), 0.0),
        (FOUND, (-1.25, -2.5), 0.5),
        (FOUND[::-1], (-2.0, -1.0), 0.0),
        ([[1, 2], [3, 5]], (-1.0, -2.0), inf),
        ([[1, 2]], (-1.0,), inf),
        ([[1, 2], [3, 4], [3, 4]], (-1.0, -2.0, -2.0), inf),
        (FOUND, None, inf),
    ],
)
def test_the_difference_of_two_searches(sequences, scores, difference):
    one = search("we", "ours", 1.0)
    assert score_difference(one, search("fake", "theirs", 1.0, sequences, scores)) == difference


def row_of(*theirs, run=SEARCH):
    ours = [search("we", "ours", 0.5, index=index) for index in range(3)]
    return Requests([*ours, *theirs], ours="we").row(peer_of(run), run, None)


def test_a_row_has_times_legal_ids_and_whether_the_same_was_found():
    row = row_of(
        search("fake", "theirs", 1.0, index=0, scores=(-1.00001, -2.0)),
        search("fake", "theirs", 2.0, index=1, scores=(-1.0, -2.0002)),
        search("fake", "theirs", 4.0, [[1, 2], [3, 5]], index=2, num_legal=1),
    )
    searches = row.searches
    assert (searches.seconds.median, searches.seconds.quartile_3) == (2.0, 3.0)
    assert searches.legal_per_s.median == 1.0  # of 2, 1 and 0.25
    assert (searches.num_returned, searches.num_legal) == (6, 5)
    assert (searches.num_same, row.same_search_as) == (1, "ours")
    assert searches.score_difference == pytest.approx(1e-5)
    assert row.time_ratio.value == 4.0


def test_a_row_of_other_work_has_no_searches():
    assert row_of(request_of("fake", "theirs", 1.0)).searches is None


def checks_of(row):
    return broken_checks({"rows": [asdict(row)]})


def test_searches_that_must_find_the_same_and_do_not_are_named():
    same, other = (search("fake", "theirs", 1.0, index=index) for index in range(2))
    assert checks_of(row_of(same, other)) == []
    other = replace(other, scores=[-1.0, -2.5])
    said = "fake, theirs, fp32: {} requests as ours, scores within 0.0001"
    assert checks_of(row_of(same, other)) == [said.format("1 of 2")]
    assert checks_of(row_of(same, other, run=replace(SEARCH, same_search_as=None))) == []
    failed = Requests([], ours="we").row(peer_of(SEARCH), SEARCH, "failed: out of memory")
    assert checks_of(failed) == ["fake, theirs, fp32: failed: out of memory"]
    alone = Requests([same], ours="we").row(peer_of(SEARCH), SEARCH, None)  # ours did not run
    assert checks_of(alone) == [said.format("0 of 1")]


def test_a_bar_of_times_does_not_look_at_tokens():
    short = replace(search("fake", "theirs", 1.0), token_ids=[1])
    found = Requests([search("we", "ours", 0.5), short], ours="we")
    bar = Bar(ours="ours", peer="fake", run="theirs", precision="fp32", aim=1.0)
    assert found.bar(bar).ratio.value == 4.0
    assert found.bar(replace(bar, measure="requests_per_s")).ratio.value == 2.0


def test_bars_are_of_rows_that_are_there():
    bars = retrieval_bars(WIDTHS)
    peers = retrieval_peers(WIDTHS)
    keys = {(peer.name, run.name, run.precision) for peer in peers for run in peer.runs}
    for bar in bars:
        assert (bar.peer, bar.run, bar.precision) in keys
        assert ("dsbd-ort", bar.ours, bar.precision) in keys
        assert bar.aim == (2.0 if bar.peer == "transformers" else 1.0)
    assert {bar.ours.partition("=")[2] for bar in bars} == {"64", "256"}
    assert retrieval_bars([4, 32]) == ()


def test_what_every_tool_said_is_judged_by_the_target(tiny_bundle, tiny_pipe):
    prompts = [Prompt(token_ids=[1, 2, 3]), Prompt(token_ids=[4, 5])]
    said = [tiny_pipe.generate(p.token_ids, max_new_tokens=6) for p in prompts]
    (ours, theirs), other = (result.sequences[0] for result in said), [7, 7, 7]
    requests = [
        request_of("dsbd-ort", "greedy", 1.0, ours.token_ids),
        request_of("tool", "greedy", 1.0, theirs.token_ids, index=1),
        request_of("tool", "greedy", 1.0, other, index=1, number=1),
    ]
    found = with_logprobs(requests, prompts, tiny_bundle.path, 1)
    assert found[0].logprob == pytest.approx(np.mean(ours.token_logprobs), abs=1e-5)
    assert found[1].logprob == pytest.approx(np.mean(theirs.token_logprobs), abs=1e-5)
    assert found[2].logprob < found[1].logprob  # tokens of no law
    peer, run = peer_of(run_of("greedy")), run_of("greedy")
    row = Requests(found, "dsbd-ort").row(replace(peer, name="tool"), run, None)
    assert row.logprob.value == pytest.approx((found[1].logprob + found[2].logprob) / 2)
