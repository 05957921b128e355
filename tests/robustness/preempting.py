"""Preemption by force: requests that lose their rows again and again, and how often that was."""

import dataclasses
import itertools
from typing import Any

import numpy as np

from dsbd_ort import Pipeline
from dsbd_ort.decoding import DecodingRequest
from dsbd_ort.decoding.engine_call import EngineCall

ONE_IN = 3


class Tally:
    """Counts for all requests of this process.

    Attributes:
        num_calls: engine calls before which a schedule was asked.
        num_preempted: how many of them found the rows of their request gone.
    """

    num_calls = 0
    num_preempted = 0

    def add(self, num_preempted: int, num_calls: int) -> None:
        """Count those of another process."""
        self.num_preempted += num_preempted
        self.num_calls += num_calls


TALLY = Tally()


class ForcedPreemptions:
    """The schedule of a request: of every three engine calls, one at random finds its rows gone."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._due = self._next_call = 0

    def __call__(self, call: EngineCall) -> bool:
        if self._next_call % ONE_IN == 0:
            self._due = self._next_call + int(self._rng.integers(ONE_IN))
        is_due = self._next_call == self._due
        self._next_call += 1
        TALLY.num_calls += 1
        TALLY.num_preempted += is_due
        return is_due


class PreemptedPipeline(Pipeline):
    """A pipeline whose requests are preempted by force, alone and in a Service."""

    _seeds = itertools.count()

    def request_of(self, *args: Any, **options: Any) -> DecodingRequest:
        preempts = ForcedPreemptions(next(self._seeds))
        return dataclasses.replace(super().request_of(*args, **options), preempts=preempts)
