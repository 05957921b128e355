"""Counting of a path's logits that differ between ways to compute them."""

from __future__ import annotations

import numpy as np

from scripts.path_ways import Way, WayCount, count_differing


class OneThreadDiffers:
    """An engine whose ways with one thread, but the plain one, have other bits in two places."""

    vocab_size = 7

    def __init__(self):
        self.ways = []

    def logits(self, token_ids, way, rng):
        found = np.repeat(token_ids[:, None], self.vocab_size, axis=1).astype(np.float32)
        if self.ways and way.threads == 1:
            found[-1, :2] = np.nextafter(found[-1, :2], np.float32(np.inf))
        self.ways.append(way)
        return found


def test_ways_and_logits_are_counted():
    engine = OneThreadDiffers()
    found = count_differing(engine, num_tokens=20, num_ways=10, seed=3)
    plain, *ways = engine.ways
    assert plain == Way.plain(20)
    num_other = sum(way.threads == 1 for way in ways)
    assert 0 < num_other < 10
    assert found == WayCount(10, num_other, 10 * 20 * 7, 2 * num_other)
    assert found + WayCount(1, 0, 5, 0) == WayCount(11, num_other, 1405, 2 * num_other)
