"""Requests of a service and their admission: first come, first served, within a bounded cache.

Most answers are far shorter than they may be, so a request is admitted once the rows that it is
expected to need are free. If rows run out nevertheless, the youngest running request is preempted
(``batched_decoder``) and becomes the first of the queue. So the oldest request is never preempted,
requests resume in the order of their arrival, and none starves.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dsbd_errors import DsbdError
from dsbd_forward.forward import Source
from dsbd_ort.decoding import DecodingRequest
from dsbd_ort.decoding.decoder import LiveRequest
from dsbd_ort.engine.errors import QueueFullError
from dsbd_ort.engine.limits import ServiceLimits
from dsbd_ort.requests.results import GenerationResult, StreamPiece, TextStream
from dsbd_runtime.errors import CapacityError


@dataclass(frozen=True)
class Cancelled:
    """The request was cancelled, by its caller or because the service was closed."""


Ending = GenerationResult | DsbdError | Cancelled
"""The last event of a request."""

ServiceEvent = StreamPiece | Ending


@dataclass(eq=False, kw_only=True)
class Submission:
    """A request of a service, from its submission to its end.

    texts: turns its iterations into stream pieces.
    most_rows: the most cache rows that it may need.
    wake: makes the engine loop look for cancelled requests.
    live: the request in the decoder, from its beginning to its end; None before and after.
    is_further: whether it is a second or later sample of an audio's window. The limit of the queue
        counts only the first sample.
    rows_reserved: cache rows that it was expected to need when it was last admitted.
    """

    request: DecodingRequest = field(repr=False)
    texts: TextStream = field(repr=False)
    most_rows: int
    on_event: Callable[[ServiceEvent], None] = field(repr=False)
    wake: Callable[[], None] = field(repr=False)
    is_running: bool = False  # only the scheduler sets it
    live: LiveRequest | None = field(default=None, repr=False)
    is_cancelled: bool = False
    is_further: bool = False
    rows_reserved: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_rows(self) -> int:
        """Its cache rows now, or at its preemption; before it begins, the prompt's length."""
        return self.num_prompt_tokens if self.live is None else self.live.num_rows

    def cancel(self) -> None:
        """Cancel it, from any thread: it ends before the next engine call."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self.wake()


_FIRST_ANSWER_ROWS = 256.0
"""Expected rows before any answer has ended, for ``_FEW_BEAMS`` beams or fewer.

With more beams the number is in proportion to them.
"""
_FEW_BEAMS = 8
_LEAST_ANSWER_ROWS = 64.0  # about the rows of an iteration
_WEIGHT = 1 / 8  # of the last answer in the mean


class AnswerRows:
    """Running mean of the rows of ended answers, without prompts. Later answers weigh more."""

    def __init__(self, first: float = _FIRST_ANSWER_ROWS) -> None:
        self.mean = first

    def learn(self, num_rows: int, *, was_cut: bool) -> None:
        """Update the mean with an answer; ``was_cut``: it ended at its length limit.

        A cut answer with fewer rows than the mean is ignored: its full length is unknown.
        """
        if not was_cut or num_rows > self.mean:
            mean = self.mean + _WEIGHT * (num_rows - self.mean)
            self.mean = max(mean, _LEAST_ANSWER_ROWS)


class Scheduler:
    """Queue and running requests, with bounds for requests and cache rows.

    No request overtakes the first of the queue, so that a request with many rows does not starve.

    waiting: in the order of their arrival; the first ones may have been preempted.
    running: admitted and not ended, in the order of their arrival.
    """

    def __init__(self, limits: ServiceLimits, max_rows: int) -> None:
        self._limits = limits
        self.max_rows = max_rows
        self._answer_rows: dict[int, AnswerRows] = {}  # by the fewest beams of a class
        self.waiting: deque[Submission] = deque()
        self.running: list[Submission] = []
        self.num_preemptions = 0

    def answer_rows(self, num_beams: int) -> AnswerRows:
        """Return the mean rows of answers with about this number of beams.

        Answers of 256 beams over item ids and answers of a chat have little in common, so each
        class of requests has twice the beams of the class before.
        """
        least = _FEW_BEAMS
        while 2 * least <= num_beams:
            least *= 2
        if least not in self._answer_rows:
            first = _FIRST_ANSWER_ROWS * least / _FEW_BEAMS
            self._answer_rows[least] = AnswerRows(first)
        return self._answer_rows[least]

    @property
    def rows_reserved(self) -> int:
        return sum(submission.rows_reserved for submission in self.running)

    @property
    def unfinished(self) -> list[Submission]:
        """All requests that have not ended, in the order of their arrival."""
        return [*self.running, *self.waiting]

    @property
    def cancelled(self) -> list[Submission]:
        return [submission for submission in self.unfinished if submission.is_cancelled]

    @property
    def may_admit(self) -> bool:
        return bool(self.waiting) and len(self.running) < self._limits.max_requests

    def enqueue(self, submission: Submission) -> None:
        """Append a request to the queue.

        CapacityError: it may need more rows than the service has. QueueFullError: too many wait.
        """
        if submission.most_rows > self.max_rows:
            raise CapacityError(
                "the prompt is too long for its options, or exceeds the available context size: "
                f"the request may need {submission.most_rows} cache rows "
                f"({submission.num_prompt_tokens} of them for the prompt), the service has "
                f"{self.max_rows}; use fewer beams or new tokens, a shorter draft or prompt"
            )
        limits, num_running, num_waiting = self._limits, len(self.running), len(self.waiting)
        num_counted = sum(not each.is_further for each in self.unfinished)
        if not submission.is_further and num_counted >= limits.max_requests + limits.max_queued:
            raise QueueFullError(
                f"the queue is full: {num_running} requests are running and {num_waiting} are "
                f"waiting, the limits are {limits.max_requests} and {limits.max_queued}; try again "
                "later"
            )
        self.waiting.append(submission)

    def admit(
        self,
        num_taken: int,
        most_sources: Callable[[Sequence[Source]], int] = len,
        accepts: Callable[[DecodingRequest, list[DecodingRequest]], bool] = lambda *_: True,
    ) -> list[Submission]:
        """Move requests from the head of the queue to ``running`` while they fit; return them.

        If no request runs, the first one always fits.

        num_taken: rows that the running requests use or are expected to use.
        most_sources: returns how many of the given sources the engines keep at a time. With more,
            sources would be encoded again in every iteration, which may take seconds.
        accepts: returns whether a request may run together with those that run.
        """
        admitted: list[Submission] = []
        while self.may_admit:
            submission = self.waiting[0]
            num_expected = self._expected_rows(submission)
            if not accepts(submission.request, [each.request for each in self.running]):
                break
            if self.running and num_taken + num_expected > self.max_rows:
                break
            of_each = dict.fromkeys(each.request.source for each in (*self.running, submission))
            sources = [source for source in of_each if source is not None]
            if self.running and 1 < len(sources) > most_sources(sources):
                break
            num_taken += num_expected
            submission.rows_reserved = num_expected
            submission.is_running = True
            self.running.append(self.waiting.popleft())
            admitted.append(submission)
        return admitted

    def preempt(self, submission: Submission) -> None:
        self.running.remove(submission)
        submission.is_running = False
        self.waiting.appendleft(submission)
        self.num_preemptions += 1

    def release(self, submission: Submission) -> None:
        (self.running if submission.is_running else self.waiting).remove(submission)
        submission.is_running, submission.live = False, None

    def _expected_rows(self, submission: Submission) -> int:
        """Return the rows of the prompt, or the rows so far, plus those of a mean answer.

        So a preempted request is admitted only if it has room to go on. Otherwise it would be
        preempted again at once.
        """
        of_answer = int(self.answer_rows(submission.request.config.num_beams).mean)
        return min(submission.num_rows + of_answer, submission.most_rows)
