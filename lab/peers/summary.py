"""Summary of the requests: a row for every run, and the target ratios of speed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dsbd_ort.benchmark.bootstrap import Estimate, Spread, bootstrap, spread
from lab.peers.catalog import (
    DSBD,
    DSBD_SHAPE,
    SPECULATIVE,
    SPECULATIVE_SEARCH,
    Peer,
    PeerRun,
)
from lab.peers.rounds import Request
from lab.peers.searches import Searches, searches_of

Key = tuple[str, str, str]  # peer, run, precision
Measure = Literal["tokens_per_s", "requests_per_s"]  # properties of a request

_SAMPLING_AIMS = {"openvino-genai": {"fp32": 1.3, "int8": 1.4}}
_SEARCH_AIMS = {
    "openvino-genai": {"fp32": 1.25, "int8": 1.6},
    "ctranslate2": {"fp32": 2.0, "int8": 4.0},
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run, compared with ours.

    Attributes:
        reason: why the run has no numbers (then all numbers are None); None if it has numbers.
        num_requests: prompts x rounds.
        num_tokens: mean number of new tokens per request.
        ratio: median of our tokens per second / this run's, for the same prompt and round.
        counterpart: our run in the ratio.
        speedup: median of its tokens per second / those of the same tool's run without a draft.
        num_valid: valid documents; None without a schema.
        tokens_per_iteration: mean; None if the tool does not report iterations.
        num_identical: requests with the same tokens as the run ``same_tokens_as``.
        peak_bytes: maximum over the processes of all rounds.
        searches: summary of the searches of ids, else None.
        time_ratio: like ``ratio``, for requests per second.
        logprob: mean over requests.
    """

    peer: str
    run: str
    precision: str
    task: str
    counterpart: str | None
    undrafted: str | None
    same_tokens_as: str | None
    same_search_as: str | None = None
    reason: str | None = None
    version: str | None = None
    settings: str | None = None
    num_requests: int | None = None
    num_tokens: float | None = None
    tokens_per_s: Spread | None = None
    ratio: Estimate | None = None
    speedup: Estimate | None = None
    num_valid: int | None = None
    tokens_per_iteration: float | None = None
    num_identical: int | None = None
    peak_bytes: int | None = None
    searches: Searches | None = None
    time_ratio: Estimate | None = None
    logprob: Estimate | None = None


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A target ratio: speed of our run / speed of another tool's run should be at least ``aim``."""

    ours: str
    peer: str
    run: str
    precision: str
    aim: float
    measure: Measure = "tokens_per_s"
    ours_precision: str | None = None  # None: that of the other tool


BARS = (
    *(
        Bar(ours=ours, peer="transformers", run="beam sampling W=4", precision="fp32", aim=6.0)
        for ours in (DSBD, DSBD_SHAPE)
    ),
    *(
        Bar(ours=ours, peer=peer, run=run, precision=precision, aim=aim)
        for ours, run, aims_of in (
            (SPECULATIVE, "sampling with a draft model", _SAMPLING_AIMS),
            (SPECULATIVE_SEARCH, "beam search W=4", _SEARCH_AIMS),
        )
        for peer, aims in aims_of.items()
        for precision, aim in aims.items()
    ),
)


@dataclass(frozen=True, kw_only=True)
class BarResult(Bar):
    """A target ratio with the measured ratio, which is None if one of the two did not run."""

    ratio: Estimate | None


class Requests:
    """The requests of a comparison, by row."""

    def __init__(self, requests: Sequence[Request], ours: str) -> None:
        """Group the requests by row; ``ours`` is the tool name of our own rows."""
        self._ours = ours
        self._by_key: dict[Key, list[Request]] = {}
        for request in requests:
            key = (request.peer, request.run, request.precision)
            self._by_key.setdefault(key, []).append(request)

    def row(self, peer: Peer, run: PeerRun, reason: str | None) -> Row:
        """Return the row of a run; ``reason``: why it failed, or None."""
        requests = self._by_key.get((peer.name, run.name, run.precision), [])
        names: dict[str, Any] = {
            "peer": peer.name,
            "run": run.name,
            "precision": run.precision,
            "task": run.task,
            "counterpart": run.counterpart,
            "undrafted": run.undrafted,
            "same_tokens_as": run.same_tokens_as,
            "same_search_as": run.same_search_as,
        }
        if reason or not requests:
            return Row(**names, reason=reason or "not measured")
        return Row(
            **names,
            version=requests[0].version,
            settings=requests[0].settings,
            num_requests=len(requests),
            num_tokens=sum(len(request.token_ids) for request in requests) / len(requests),
            tokens_per_s=spread([request.tokens_per_s for request in requests]),
            ratio=self._ratio(run.counterpart, requests),
            speedup=self._speedup(run.undrafted, requests),
            num_valid=_num_valid(requests),
            tokens_per_iteration=_tokens_per_iteration(requests),
            num_identical=self._num_identical(run.same_tokens_as, requests),
            peak_bytes=max(request.peak_bytes for request in requests),
            searches=searches_of(requests, self._searches_to_match(run, requests)),
            time_ratio=self._ratio(run.counterpart, requests, "requests_per_s"),
            logprob=_logprob(requests),
        )

    def bar(self, bar: Bar) -> BarResult:
        """Return a target ratio with the measured ratio."""
        requests = self._by_key.get((bar.peer, bar.run, bar.precision), [])
        ratio = self._ratio(bar.ours, requests, bar.measure, bar.ours_precision)
        return BarResult(**vars(bar), ratio=ratio)

    def _ratio(
        self,
        name: str | None,
        theirs: Sequence[Request],
        measure: Measure = "tokens_per_s",
        precision: str | None = None,
    ) -> Estimate | None:
        pairs = self._pairs(self._ours, name, theirs, precision)
        return _median([getattr(ours, measure) / getattr(other, measure) for ours, other in pairs])

    def _speedup(self, undrafted: str | None, drafted: Sequence[Request]) -> Estimate | None:
        if not drafted:
            return None
        pairs = self._pairs(drafted[0].peer, undrafted, drafted)
        return _median([other.tokens_per_s / plain.tokens_per_s for plain, other in pairs])

    def _num_identical(self, name: str | None, theirs: Sequence[Request]) -> int | None:
        pairs = self._pairs(self._ours, name, theirs)
        if not pairs:
            return None
        return sum(ours.token_ids == other.token_ids for ours, other in pairs)

    def _searches_to_match(
        self, run: PeerRun, theirs: Sequence[Request]
    ) -> list[tuple[Request, Request]] | None:
        if run.same_search_as is None:
            return None
        return self._pairs(self._ours, run.same_search_as, theirs)

    def _pairs(
        self,
        peer: str,
        name: str | None,
        theirs: Sequence[Request],
        precision: str | None = None,
    ) -> list[tuple[Request, Request]]:
        """Return pairs for the same prompt and round: of the run ``name`` of ``peer``, and theirs.

        precision: precision of the run ``name``; None: that of ``theirs``.
        """
        if name is None or not theirs:
            return []
        key = (peer, name, precision or theirs[0].precision)
        ours = self._by_key.get(key, [])
        by_pair = {(request.prompt_index, request.round): request for request in ours}
        pairs = [(by_pair.get((other.prompt_index, other.round)), other) for other in theirs]
        return [(request, other) for request, other in pairs if request is not None]


def _median(ratios: list[float]) -> Estimate | None:
    return bootstrap(ratios, "median") if ratios else None


def _num_valid(requests: Sequence[Request]) -> int | None:
    if requests[0].is_valid is None:
        return None
    return sum(bool(request.is_valid) for request in requests)


def _logprob(requests: Sequence[Request]) -> Estimate | None:
    logprobs = [request.logprob for request in requests if request.logprob is not None]
    return bootstrap(logprobs, "mean") if logprobs else None


def _tokens_per_iteration(requests: Sequence[Request]) -> float | None:
    counts = [request.num_iterations for request in requests]
    if None in counts:
        return None
    return sum(len(request.token_ids) for request in requests) / sum(filter(None, counts))
