"""Statistics of rows and bars, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

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
    found = Requests(
        [
            request_of("fake", "theirs", 1.0, (1, 2, 3), 0, is_valid=True, num_iterations=1),
            request_of("fake", "theirs", 1.0, (1, 2, 3), 1, is_valid=False, num_iterations=3),
        ],
        ours="we",
    )
    row = found.row(peer_of(RUN), RUN, None)
    assert (row.num_valid, row.num_requests, row.tokens_per_iteration) == (1, 2, 1.5)


def test_a_row_is_compared_with_the_same_tool_without_a_draft():
    drafted = replace(RUN, name="drafted", undrafted="theirs")
    found = Requests(
        [
            request_of("fake", "theirs", 3.0),
            request_of("we", "theirs", 100.0),
            request_of("fake", "drafted", 1.5),
        ],
        ours="we",
    )
    row = found.row(peer_of(RUN), drafted, None)
    assert (row.speedup.value, row.tokens_per_iteration) == (2.0, None)
