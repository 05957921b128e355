"""Searches that return all their beams: legal ids, times, and whether two found the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from dsbd_ort.benchmark.bootstrap import Spread, spread
from lab.peers.rounds import Request

SCORE_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Searches:
    """The requests of one run.

    Attributes:
        seconds: of a request.
        legal_per_s: different legal ids of a request, per second of it.
        num_returned, num_legal: sequences, and different ids among them, of all requests.
        num_same: requests with the sequences of the run that must find the same, whose scores are
            within ``SCORE_TOLERANCE``; None where there is no such run.
        score_difference: the largest of those requests; None without any.
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
    """Return the summary of a run's requests; None if they were no searches of ids.

    pairs: requests of the run that must find the same and of this one, of the same prompt and
        round; None where there is no such run.
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
    """Return the largest difference of a score; inf where other sequences were found.

    Their order follows from the scores, but where these are as good as equal.
    """
    ours, theirs = _scores(one), _scores(other)
    if ours is None or theirs is None or ours.keys() != theirs.keys():
        return inf
    return max((abs(ours[sequence] - theirs[sequence]) for sequence in ours), default=0.0)


def _scores(request: Request) -> dict[tuple[int, ...], float] | None:
    """Return the score of every sequence; None if one is there twice, or there are no scores."""
    if request.sequences is None or request.scores is None:
        return None
    scores = dict(zip(map(tuple, request.sequences), request.scores, strict=True))
    return scores if len(scores) == len(request.sequences) else None


def broken_checks(report: dict[str, Any]) -> list[str]:
    """Return the rows of a report that had to find what ours found, and did not or did not run."""
    broken = []
    for row in report["rows"]:
        searches, wanted = row.get("searches"), row.get("same_search_as")
        if wanted is None:
            continue
        name = f"{row['peer']}, {row['run']}, {row['precision']}"
        if searches is None:
            broken.append(f"{name}: {row['reason']}")
        elif searches["num_same"] < row["num_requests"]:
            found = f"{searches['num_same']} of {row['num_requests']} requests"
            broken.append(f"{name}: {found} as {wanted}, scores within {SCORE_TOLERANCE:g}")
    return broken
