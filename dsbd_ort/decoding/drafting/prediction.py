"""A predicted text, followed by the paths of a request: the place where each goes on, after edits.

A path that has repeated the prediction goes on with the next predicted token. If its last tokens
were not expected, the next one follows, in this order: the last token's nearest other place, as
after a deletion; the tokens that it has in place of predicted ones; those that it has in addition.
A place that more tokens lead to is looked for further away: 1 token up to 8 away, 2 up to 64, ...
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

_REACH = 8
_NEAREST = 16  # places of a token that are compared, on each side: bounds the time
_FIRST_RATE, _LEAST_RATE, _STEP = 0.9, 0.05, 0.05  # of how often the next token was right
_SURE = 0.75  # probability that the next tokens of all beams are right
_SHARES = (0.4, 0.25, 0.15)  # of the places to go on, likeliest first, after one unexpected token


@dataclass(frozen=True, slots=True)
class Place:
    """A path's place in the prediction.

    lost_at: the first predicted token that the path has not repeated.
    num_lost: tokens of the path since then; 0 if it follows the prediction.
    next_places: of the predicted tokens that may come next, likeliest first.
    """

    lost_at: int = 0
    num_lost: int = 0
    next_places: tuple[int, ...] = (0,)


class Prediction:
    """The tokens that an output is expected to repeat, and how often it did.

    Worked example, of the prediction [1, 2, 3, 4, 5]: after the path [1, 2] token 3 is expected, at
    place 2. After [1, 2, 9] these are, by place: 3, token 4, as if 9 had replaced 3; and 2, token
    3, as if 9 had been inserted. After [1, 2, 4]: 4, token 5, as if 3 had been deleted, then both.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = tuple(map(int, token_ids))
        self._rate = _FIRST_RATE
        self._places: defaultdict[int, list[int]] = defaultdict(list)  # of each token, increasing
        for place, token in enumerate(self.token_ids):
            self._places[token].append(place)

    def after(self, place: Place, path: Sequence[int]) -> Place:
        """Return the place of a path, of which the last tokens suffice; ``place``: without one."""
        tokens = self.token_ids
        if not tokens:
            return place
        for expected in place.next_places:
            if expected < len(tokens) and tokens[expected] == path[-1]:
                return Place(expected + 1, 0, (expected + 1,))
        lost_at, num_lost = place.lost_at, place.num_lost + 1
        expected = lost_at + num_lost - 1  # of the last token, if each has replaced another
        # First only from there on: in a text that repeats itself all before an edit agrees best.
        nearest, num_agreeing = self._nearest(expected, path, lost_at)
        if num_agreeing < 2 <= num_lost:
            nearest, num_agreeing = self._nearest(expected, path, 0)
        if num_agreeing > 1:
            return Place(nearest + 1, 0, (nearest + 1,))
        deleted = (nearest + 1,) if num_agreeing else ()
        return Place(lost_at, num_lost, tuple(dict.fromkeys((*deleted, expected + 1, lost_at))))

    def shares(self, place: Place) -> dict[int, float]:
        """Return the probabilities of the tokens that may come next; less than 1 together."""
        share_by_token: dict[int, float] = {}
        for next_place, share in zip(place.next_places, _SHARES, strict=False):
            if next_place < len(self.token_ids):
                token = self.token_ids[next_place]
                probability = share / place.num_lost if place.num_lost else self._rate
                share_by_token[token] = share_by_token.get(token, 0.0) + probability
        return share_by_token

    def learn(self, places: Sequence[Place]) -> None:
        """Count the places of selected paths: whether each follows, if its parent did."""
        for place in places:
            if place.num_lost < 2:
                rate = self._rate + _STEP * ((not place.num_lost) - self._rate)
                self._rate = max(rate, _LEAST_RATE)

    def replaces_model(self, place: Place, num_beams: int) -> bool:
        """Return whether the next token is sure enough to do without a draft model's call.

        Of all ``num_beams`` beams: a layer without one of their next tokens is not accepted.
        """
        return not place.num_lost and self._rate**num_beams > _SURE

    def num_repeated(self, token_ids: Sequence[int]) -> int:
        """Return how many predicted tokens an output repeats, each counted once."""
        place, repeated = Place(), set[int]()
        for end in range(1, len(token_ids) + 1):
            place = self.after(place, token_ids[max(0, end - _REACH) : end])
            if not place.num_lost:
                repeated.add(place.lost_at - 1)
        return len(repeated)

    def _nearest(self, expected: int, path: Sequence[int], first: int) -> tuple[int, int]:
        """Return the last token's place that most tokens lead to, and their number, 0 for none.

        Of several, from ``first`` on, the nearest to ``expected``; those further away than their
        tokens reach are left out.
        """
        places = self._places.get(path[-1], [])
        middle = bisect_left(places, expected)
        begin = max(bisect_left(places, first), middle - _NEAREST)
        candidates = [(0, 0, 0)]
        for place in places[begin : middle + _NEAREST]:
            num_agreeing, distance = self._num_agreeing(place, path), abs(place - expected)
            if distance <= _REACH**num_agreeing:
                candidates.append((num_agreeing, -distance, place))
        num_agreeing, _, place = max(candidates)
        return place, num_agreeing

    def _num_agreeing(self, place: int, path: Sequence[int]) -> int:
        """Return how many tokens up to a place are the last ones of a path, at most ``_REACH``."""
        reach, number = min(_REACH, len(path), place + 1), 0
        while number < reach and self.token_ids[place - number] == path[-1 - number]:
            number += 1
        return number
