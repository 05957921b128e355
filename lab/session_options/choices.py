"""Session options that are measured, and those that the runtime sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnxruntime as ort

Change = Callable[[ort.SessionOptions], None]


def as_it_is(options: ort.SessionOptions) -> None:
    """Change nothing."""


@dataclass(frozen=True)
class Choice:
    """One line of the table: ``change`` is made to the options that the runtime uses today.

    Attributes:
        verdict: whether the runtime does it, and why where the figures do not show it.
        is_grouped: whether attention is grouped instead, which is a choice of the export.
    """

    name: str
    verdict: str
    change: Change = as_it_is
    is_grouped: bool = False


def _entry(key: str, value: str) -> Change:
    return lambda options: options.add_session_config_entry(key, value)


def _field(name: str, value: object) -> Change:
    return lambda options: setattr(options, name, value)


def _parallel(options: ort.SessionOptions) -> None:
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.inter_op_num_threads = 2


def _pinned(options: ort.SessionOptions) -> None:
    """Bind every thread but the caller's to a core; they count from 1."""
    cores = [str(core) for core in range(2, options.intra_op_num_threads + 1)]
    if cores:  # an empty list is refused
        options.add_session_config_entry("session.intra_op_thread_affinities", ";".join(cores))


NO_SPINNING = _entry("session.intra_op.allow_spinning", "0")
LONG_SPINNING = _entry("session.intra_op.spin_duration_us", "-1")

_LEVELS = ort.GraphOptimizationLevel
CHOICES = (
    Choice("no memory arena", "not kept", _field("enable_cpu_mem_arena", False)),
    Choice("no memory pattern", "not kept", _field("enable_mem_pattern", False)),
    Choice(
        "graph optimization: extended",
        "not kept",
        _field("graph_optimization_level", _LEVELS.ORT_ENABLE_EXTENDED),
    ),
    Choice(
        "graph optimization: basic",
        "not kept",
        _field("graph_optimization_level", _LEVELS.ORT_ENABLE_BASIC),
    ),
    Choice("one thread", "not kept", _field("intra_op_num_threads", 1)),
    Choice("no busy waiting", "`--spin-us 0`", NO_SPINNING),
    Choice("busy waiting for milliseconds (ONNX Runtime's own)", "not kept", LONG_SPINNING),
    Choice(
        "busy waiting for 100 us",
        "`--spin-us 100`",
        _entry("session.intra_op.spin_duration_us", "100"),
    ),
    Choice("work cut finer as it goes", "not kept", _entry("session.dynamic_block_base", "4")),
    Choice("operators side by side (parallel mode)", "not kept", _parallel),
    Choice("denormals as zero", "not kept", _entry("session.set_denormal_as_zero", "1")),
    Choice("threads pinned to cores", "not kept", _pinned),
    Choice("grouped attention", "`dsbd-export --attention grouped`", is_grouped=True),
)


@dataclass(frozen=True)
class Sharing:
    """How target and draft share the cores: one line of the last table.

    Attributes:
        draft_role: "draft", or "target" for a draft as large as the target.
        is_kept: whether ``load_pair`` does it with a draft of that size.
    """

    name: str
    target: Change
    draft: Change
    draft_role: str = "draft"
    is_kept: bool = False


def _one_thread(options: ort.SessionOptions) -> None:
    options.intra_op_num_threads = 1


_DRAFTS = (
    ("small draft on one thread", _one_thread, "draft"),
    ("small draft on all threads", as_it_is, "draft"),
    ("large draft", as_it_is, "target"),
)
_WAITING = (
    ("busy waiting for 20 us", as_it_is),
    ("busy waiting for milliseconds", LONG_SPINNING),
    ("no busy waiting", NO_SPINNING),
)


def _both(first: Change, second: Change) -> Change:
    def change(options: ort.SessionOptions) -> None:
        first(options)
        second(options)

    return change


SHARINGS = tuple(
    Sharing(
        f"{draft}, {waiting}",
        wait,
        _both(wait, threads),
        role,
        is_kept=wait is as_it_is and draft != "small draft on all threads",
    )
    for draft, threads, role in _DRAFTS
    for waiting, wait in _WAITING
)
