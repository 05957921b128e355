"""Searches that return all beams: legal ids, times, and whether two had the same results."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from dsbd_ort.benchmark.bootstrap import Spread, spread
from lab.peers.rounds import Request

SCORE_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Searches:
    """Summary of the search requests of one run.

    Attributes:
        seconds: duration of a request.
        legal_per_s: distinct legal ids of a request per second.
        num_returned, num_legal: sequences of all requests, and distinct ids among them.
        num_same: requests that have the same sequences as the run ``same_search_as``, with scores
            within ``SCORE_TOLERANCE``; None without such a run.
        score_difference: largest score difference of these requests; None without them.
    """

    seconds: Spread
    legal_per_s: Spread
    num_returned: int
    num_legal: int
    num_same: int | None
    score_difference: float | None


def searches_of(
    requests: Sequence[Request], pairs: Sequence[tuple[Request, Request]] | None
) -> Searches | None:
    """Return the summary of a run's requests; None if they did not search ids.

    pairs: for the same prompt and round, the request of the run ``same_search_as`` and that of
        this run; None without such a run.
    """
    legal = [request.num_legal for request in requests if request.num_legal is not None]
    if not legal:
        return None
    times = [request.seconds for request in requests]
    differences = [score_difference(one, other) for one, other in pairs or ()]
    same = [difference for difference in differences if difference <= SCORE_TOLERANCE]
    return Searches(
        seconds=spread(times),
        legal_per_s=spread([number / time for number, time in zip(legal, times, strict=True)]),
        num_returned=sum(len(request.sequences or ()) for request in requests),
        num_legal=sum(legal),
        num_same=None if pairs is None else len(same),
        score_difference=max(same, default=None),
    )


def score_difference(one: Request, other: Request) -> float:
    """Return the largest score difference; inf if the sequences differ.

    The order of sequences is not compared: it differs only for almost equal scores.
    """
    ours, theirs = _scores(one), _scores(other)
    if ours is None or theirs is None or ours.keys() != theirs.keys():
        return inf
    return max((abs(ours[sequence] - theirs[sequence]) for sequence in ours), default=0.0)


def _scores(request: Request) -> dict[tuple[int, ...], float] | None:
    """Return the score of every sequence; None without scores, or if a sequence occurs twice."""
    if request.sequences is None or request.scores is None:
        return None
    scores = dict(zip(map(tuple, request.sequences), request.scores, strict=True))
    return scores if len(scores) == len(request.sequences) else None


def broken_checks(report: dict[str, Any]) -> list[str]:
    """Return the rows of a report with ``same_search_as`` that had other results or did not run."""
    broken = []
    for row in report["rows"]:
        searches, wanted = row.get("searches"), row.get("same_search_as")
        if wanted is None:
            continue
        name = f"{row['peer']}, {row['run']}, {row['precision']}"
        if searches is None:
            broken.append(f"{name}: {row['reason']}")
        elif searches["num_same"] < row["num_requests"]:
            num_same = f"{searches['num_same']} of {row['num_requests']} requests"
            broken.append(f"{name}: {num_same} as {wanted}, scores within {SCORE_TOLERANCE:g}")
    return broken
