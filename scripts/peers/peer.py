"""A tool to compare with, and what it is to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Source = Literal["bundle", "checkpoints", "conversion", "checkout"]


class PeerError(Exception):
    """A tool cannot be installed, converted for or run; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """One row of the comparison.

    Attributes:
        name: what is done; with the tool and the precision it names the row.
        precision, task, options: see ``runners.serve.Job``.
        counterpart: the run of ours, of the same precision, that does the same; None for ours.
        same_tokens_as: the run of ours whose tokens should be these, None where nothing ties
            the two.
    """

    name: str
    precision: str
    task: str
    options: Mapping[str, Any] = field(default_factory=dict)
    counterpart: str | None = None
    same_tokens_as: str | None = None


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One tool.

    Attributes:
        name: of its row, and of its folder below the work folder.
        runner: module below peers.runners.
        source: what its runner opens: a bundle of ours, the checkpoints themselves, a conversion
            by the tool, a checkout of its code.
        installs: arguments of one ``pip install`` each; none: this very environment.
        runs: its rows.
    """

    name: str
    runner: str
    source: Source
    installs: tuple[tuple[str, ...], ...] = ()
    runs: tuple[PeerRun, ...]
