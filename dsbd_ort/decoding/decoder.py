"""A decoder runs requests on engines: in numpy (``batched_decoder``) or in C++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dsbd_ort.decoding.request import DecodingRequest
from dsbd_ort.decoding.result import DecodeResult, IterationOutput

Outcome = DecodeResult | BaseException
"""How a request ended; an exception is the one that ``decode`` would have raised, of any type, as
trace recorders and stop states are callers' code: the other requests go on."""


@dataclass(frozen=True)
class Preempted:
    """The request has given up its rows: it waits until it is resumed."""


class LiveRequest(Protocol):
    """A request in a decoder, from ``join`` to its end or ``leave``."""

    @property
    def request(self) -> DecodingRequest:
        """The request that joined."""

    @property
    def num_rows(self) -> int:
        """Rows that it has in the cache of one engine, those included to be computed again."""

    @property
    def num_rows_at_end(self) -> int:
        """Rows that a request that returned a result had in the cache of one engine."""


@dataclass(eq=False, slots=True)
class Progress:
    """The output of an iteration for one request, its preemption or its end."""

    live: LiveRequest
    event: IterationOutput | Preempted | Outcome


class Decoder(Protocol):
    """The live requests of a target and, if there is one, its draft."""

    @property
    def num_live(self) -> int:
        """Live requests, without those that were preempted."""

    @property
    def num_used_rows(self) -> int:
        """Rows that live requests use in the cache of one engine, shared ones counted once."""

    def accepts(self, request: DecodingRequest, others: Sequence[DecodingRequest]) -> bool:
        """Return whether a request may be live together with others."""

    def join(self, request: DecodingRequest) -> LiveRequest:
        """Take in a request, which starts with the next iteration.

        Or once its prompt is computed, if another request is computing the same one. Raises what
        ``decoding_loop`` raises, unless it starts later.
        """

    def iterate(self) -> Sequence[Progress]:
        """Run one iteration of every request; return its outputs, none of unfinished prompts."""

    def preempt(self, live: LiveRequest) -> None:
        """Drop the rows of a live request, which waits until it is resumed."""

    def resume(self, live: LiveRequest) -> None:
        """Let a preempted request go on, as the youngest, with the next iteration."""

    def leave(self, live: LiveRequest) -> None:
        """Give up a request between two iterations; one that is over has left already."""

    def keep_for(self, request: DecodingRequest | None) -> None:
        """Drop all cache rows except the prefix that this request can reuse; None: all rows.

        No request may be live.
        """

    def forget(self) -> None:
        """Let no request begin with rows of those that are over."""
