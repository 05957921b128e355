"""The end of a path, the part that the draft model reads (docs/algorithm.md 5).

A draft model needs no whole prompt: with the last 256 of a thousand tokens the draft of a real pair
agrees with its target in 94 to 100 % of the tokens in which it agrees with the whole (lab/results).
Outputs that do not depend on the draft do not depend on its context either.

A context of N tokens means that between N and 1.5 N are read: the start moves in steps of N / 2, so
that the next turn of a chat, and requests whose prompts end alike, reuse rows. "auto" takes, of the
sizes in ``SIZES`` and the whole path, the one with the largest expected gain: the time that drafts
save in what is left of the answer, less the time that reading takes. With less context drafts agree
less often: first by a table, then by the accepted layers (``AcceptanceEstimator.agreement``).

A path that outgrows the draft's context, or 2 N if N is given, begins again with its last tokens.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from dsbd_forward.forward import Source
from dsbd_forward.spec import EngineSpec
from dsbd_ort.decoding.drafting.acceptance import SIZES, WHOLE, AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import LOOK_AHEAD, RequestCosts

_LEAST_LEFT = 32  # tokens that follow if an answer is as long as the earlier ones already
UNPRICED = 256
"""The size that "auto" takes if the costs of calls are unknown."""


def reads_whole_path(draft: EngineSpec, source: Source) -> bool:
    """Return whether a draft's rows need all rows before them: features, or those of a source."""
    return draft.reads_features or draft.reads_source or source is not None


def start_of(num_tokens: int, size: int) -> int:
    """Return where a path of so many tokens begins for the draft: 1000 tokens, size 128: at 832."""
    step = max(size // 2, 1)
    return max((num_tokens - size) // step * step, 0)


class DraftContext:
    """Where the draft's path of one request begins.

    Position p of the request's path is position p - ``offset`` of the draft's. ``start``: the first
    token that it reads, after the begin token if the prompt has one; 0: the whole path.
    """

    def __init__(
        self,
        size: int | Literal["all", "auto"],
        most_tokens: int | None,
        begin_token: int | None,
        lengths: tuple[int, int, int],
        costs: RequestCosts | None,
        estimator: AcceptanceEstimator,
    ) -> None:
        """Take the option, the positions of the draft (None: no limit) and the begin token.

        lengths: tokens of the prompt, most new tokens, and most layers of a draft.
        """
        self._size, self._costs, self._estimator = size, costs, estimator
        self._num_prompt, self._max_new_tokens, self._most_layers = lengths
        self._begin = [] if begin_token is None else [begin_token]
        limits = [most_tokens, 2 * size + self._most_layers if isinstance(size, int) else None]
        self._most = min((limit for limit in limits if limit is not None), default=None)
        self.start, self.size = 0, WHOLE
        self._is_chosen = False

    @property
    def num_begin(self) -> int:
        """Rows of the draft before the one of ``start``: that of a begin token before it."""
        return len(self._begin) if self.start else 0

    @property
    def offset(self) -> int:
        return self.start - self.num_begin

    def tokens(self, path: Sequence[int], start: int | None = None) -> list[int]:
        """Return the draft's tokens of a path, from ``start`` on; None: from the chosen one on."""
        start = self.start if start is None else start
        return [*self._begin, *path[start:]] if start else list(path)

    def reaches(self, position: int) -> bool:
        """Return whether a draft after this position of the request's path has positions."""
        return self._most is None or position + self._most_layers - self.offset < self._most

    def can_reach(self, first: int, position: int) -> bool:
        """Return whether it would have positions if the path began with ``first``."""
        return self._most is None or self._least_start(position) <= first

    def begin_again(self, first: int, position: int) -> int:
        """Move the start on, to ``first`` at most, until ``reaches``; return by how much.

        Not to the end of a draft: if it is rejected, the next one begins after ``position``.
        """
        assert self._most is not None
        size = self._most // 2
        if isinstance(self._size, int):
            size = min(size, self._size)
        before = self.offset
        self.start = min(max(start_of(position, size), self._least_start(position)), first)
        return self.offset - before

    def _least_start(self, position: int) -> int:
        assert self._most is not None
        return position + self._most_layers + len(self._begin) + 1 - self._most

    def choose(self, num_tokens: int, num_cached: Callable[[int], int]) -> int:
        """Choose ``start`` for a path of which so many tokens are read next; return how many.

        num_cached: returns, by start, how many of the draft's tokens have rows already.
        """
        num_left = self._num_left(num_tokens - self._num_prompt)
        size_by_start = self._size_by_start(num_tokens, num_left)
        can_go_on = self._is_chosen and self.reaches(num_tokens)
        if can_go_on and num_cached(self.start):
            size_by_start = {self.start: self.size, **size_by_start}
            if self._size != "auto" or self._costs is None:
                size_by_start = {self.start: self.size}
        num_unread = {
            start: num_tokens - start + len(self._begin) * (start > 0) - num_cached(start)
            for start in size_by_start
        }

        def gain(start: int) -> float:
            """Return the seconds that drafts are expected to save."""
            costs, estimator, size = self._costs, self._estimator, size_by_start[start]
            if costs is None or len(size_by_start) == 1:
                return 0.0
            speed = expected_speed(costs, estimator, estimator.agreement(size))
            usual = costs.seconds[costs.num_beams] + estimator.loop.iteration
            return num_left * usual * (1.0 - 1.0 / speed) - costs.reading(num_unread[start], 0)

        self.start, self._is_chosen = max(size_by_start, key=gain), True
        self.size = size_by_start[self.start]
        return num_unread[self.start]

    def _num_left(self, num_new: int) -> int:
        """Return how many tokens are expected to follow so many new ones."""
        expected = round(self._estimator.answer_length) or self._max_new_tokens
        return min(max(expected - num_new, _LEAST_LEFT), max(self._max_new_tokens - num_new, 1))

    def _size_by_start(self, num_tokens: int, num_left: int) -> dict[int, int]:
        """Return the starts to choose from, the longest path first, each with its size."""
        largest = WHOLE if self._most is None else max(self._most // 2, 1)
        if self._most is not None and num_tokens + num_left <= self._most:
            largest = WHOLE
        sizes: tuple[int, ...] = (largest, *SIZES[::-1])
        if isinstance(self._size, int):
            sizes = (self._size,)
        elif self._size == "all":
            sizes = (largest,)
        elif self._costs is None:
            sizes = (UNPRICED,)
        size_by_start: dict[int, int] = {}
        for size in sizes:
            size = min(size, largest)
            start = start_of(num_tokens, size)
            size_by_start.setdefault(start, size if start else WHOLE)
        return size_by_start


def expected_speed(
    costs: RequestCosts, estimator: AcceptanceEstimator, agreement: float = 1.0
) -> float:
    """Return the tokens of the best draft in the time of an iteration without one, 1 at least.

    As if every layer were as wide as there are beams and accepted with the mean probability of the
    latest layers times ``agreement``.
    """
    width, acceptance = costs.num_beams, estimator.acceptance * agreement
    loop, tokens, reach, best = estimator.loop, 1.0, 1.0, 1.0
    usual = costs.seconds[width] + loop.iteration
    for num_layers in range(1, LOOK_AHEAD + 1):
        num_rows = min(width * (1 + num_layers), costs.most_rows)
        seconds = costs.seconds[num_rows] + loop.iteration
        seconds += num_layers * (costs.draft[width] + loop.layer)
        reach *= acceptance
        tokens += reach
        best = max(best, tokens * usual / seconds)
    return best
