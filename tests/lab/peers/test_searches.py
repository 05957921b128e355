"""Searches that return all beams, by hand: what they count, and when two found the same."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import inf

import pytest

from lab.peers.retrieval import WIDTHS, retrieval_bars, retrieval_peers
from lab.peers.searches import broken_checks, score_difference
from lab.peers.summary import Bar, Requests
from tests.lab.peers.samples import peer_of, request_of, run_of

RUN = replace(run_of("theirs"), counterpart="ours", same_search_as="ours")
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


def row_of(*theirs, run=RUN):
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
    assert checks_of(row_of(same, other)) == [
        "fake, theirs, fp32: 1 of 2 requests as ours, scores within 0.0001"
    ]
    assert checks_of(row_of(same, other, run=replace(RUN, same_search_as=None))) == []
    failed = Requests([], ours="we").row(peer_of(RUN), RUN, "failed: out of memory")
    assert checks_of(failed) == ["fake, theirs, fp32: failed: out of memory"]
    alone = Requests([same], ours="we").row(peer_of(RUN), RUN, None)  # ours did not run
    assert checks_of(alone) == ["fake, theirs, fp32: 0 of 1 requests as ours, scores within 0.0001"]


def test_a_bar_of_times_does_not_look_at_tokens():
    short = replace(search("fake", "theirs", 1.0), token_ids=[1])
    found = Requests([search("we", "ours", 0.5), short], ours="we")
    bar = Bar(ours="ours", peer="fake", run="theirs", precision="fp32", aim=1.0)
    assert found.bar(bar).ratio.value == 4.0
    assert found.bar(replace(bar, measure="requests_per_s")).ratio.value == 2.0


def test_bars_are_of_rows_that_are_there():
    bars = retrieval_bars(WIDTHS)
    keys = {
        (peer.name, run.name, run.precision)
        for peer in retrieval_peers(WIDTHS)
        for run in peer.runs
    }
    for bar in bars:
        assert (bar.peer, bar.run, bar.precision) in keys
        assert ("dsbd-ort", bar.ours, bar.precision) in keys
        assert bar.aim == (2.0 if bar.peer == "transformers" else 1.0)
    assert {bar.ours.partition("=")[2] for bar in bars} == {"64", "256"}
    assert retrieval_bars([4, 32]) == ()
