"""Whisper's rules of times, as a logits processor."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.logits_processing.candidates import Candidates, LogitsProcessor, Scores
from dsbd_ort.decoding.logits_processing.path_states import Tokens


class Timestamps(LogitsProcessor):
    """Whisper's rules for times, which are the tokens after ``<|notimestamps|>``.

    They come in pairs, except the first of a path and one before its end, and never decrease; a
    path begins with one. If all times together are more probable than the most probable other
    token, one of them follows (Radford et al. 2022, section 3.8 and their code).
    """

    raises = True  # every time counts, also one that a top-k head has left out

    def __init__(self, config: DecodingConfig) -> None:
        """Take the options of a request that has ``no_timestamps_token_id``."""
        no_timestamps = config.no_timestamps_token_id
        assert no_timestamps is not None  # the caller has asked
        last = config.last_timestamp_token_id
        self._first = no_timestamps + 1
        self._stop = None if last is None else last + 1  # tokens from there on are those of texts
        self._max_initial_index = config.max_initial_timestamp_index
        self._end = min(config.eos_ids, default=no_timestamps)  # below it are tokens of texts

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        paths, nodes = candidates.paths, candidates.nodes
        for row, (node, num_new) in enumerate(
            zip(nodes.tolist(), paths.num_new(nodes).tolist(), strict=True)
        ):
            tokens = None if candidates.tokens is None else candidates.tokens[row]
            new = paths.path(node)[paths.num_prompt :] if num_new else np.arange(0)
            for begin, end in self._forbidden(new):
                scores[row, _between(tokens, begin, end)] = -np.inf
            self._prefer_times(scores[row], tokens)
        return scores

    def _forbidden(self, new: Tokens) -> Iterator[tuple[int, int | None]]:
        """Yield the first and the end of ranges of tokens that may not follow new ones."""
        first, stop = self._first, self._stop
        yield first - 1, first
        if not len(new):
            yield 0, first
            if stop is not None:
                yield stop, None
            if self._max_initial_index is not None:
                yield first + self._max_initial_index + 1, None
            return
        is_time = new >= first
        if stop is not None:
            is_time &= new < stop
        is_after_time = is_time[-1]
        is_after_pair = is_after_time and (len(new) == 1 or is_time[-2])
        if is_after_pair:
            yield first, stop
        elif is_after_time:
            yield 0, self._end
            if stop is not None:
                yield stop, None
        times = new[is_time]
        if len(times):  # the second of a pair may be as the first
            yield first, int(times[-1]) + (not is_after_time or is_after_pair)

    def _prefer_times(self, scores: NDArray[np.float64], tokens: Tokens | None) -> None:
        """Leave the times alone if they are more probable than every other token.

        scores, tokens: (n,). Of one path; changed in place.
        """
        of_times = _between(tokens, self._first, self._stop)
        others = [_between(tokens, 0, self._first)]
        if self._stop is not None:
            others.append(_between(tokens, self._stop, None))
        times = scores[of_times]
        largest = times.max(initial=-np.inf)
        if largest == -np.inf:
            return
        together = largest + np.log(np.exp(times - largest).sum())
        if together > max(float(scores[part].max(initial=-np.inf)) for part in others):
            for part in others:
                scores[part] = -np.inf


def _between(tokens: Tokens | None, begin: int, end: int | None) -> slice | NDArray[np.bool_]:
    """Return the places of tokens ``begin`` to ``end - 1`` of one path; None: of all from there."""
    if tokens is None:
        return slice(begin, end)
    is_after = tokens >= begin
    return is_after if end is None else is_after & (tokens < end)
