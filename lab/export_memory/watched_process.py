"""Process whose memory is sampled, stage by stage."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.machine import memory_of

_PERIOD_S = 0.02
_START = "(start)"


@dataclass(kw_only=True)
class StagePeak:
    """The highest memory seen while a stage ran, in bytes."""

    seconds: float = 0.0
    resident: int = 0
    anonymous: int = 0


@dataclass(kw_only=True)
class WatchedRun:
    """Time and memory of a finished command.

    Attributes:
        peak_resident: bytes of peak resident memory (including mapped file pages), as the kernel
            counts them. Not that of wait4, which may be the size of this process.
        peak_anonymous: the part that belongs to no file, sampled.
        stages: the same by the line of stderr that was the last one.
        stderr: all lines.
    """

    exit_code: int = -1
    seconds: float = 0.0
    peak_resident: int = 0
    peak_anonymous: int = 0
    stages: dict[str, StagePeak] = field(default_factory=dict)
    stderr: list[str] = field(default_factory=list)

    @property
    def peak_stage(self) -> str:
        """Return the stage in which most memory was in use."""
        return max(self.stages, key=lambda stage: self.stages[stage].resident)


def watch(command: Sequence[str]) -> WatchedRun:
    """Run ``command`` to its end; its stdout is dropped."""
    run = WatchedRun(stages={_START: StagePeak()})
    began = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        sampler = threading.Thread(target=_sample, args=(process.pid, run), daemon=True)
        sampler.start()
        assert process.stderr is not None  # stderr is a pipe
        for line in process.stderr:
            run.stages.setdefault(line.strip(), StagePeak())
            run.stderr.append(line.strip())
        run.exit_code = process.wait()
        sampler.join()
    run.seconds = time.monotonic() - began
    run.peak_anonymous = max(stage.anonymous for stage in run.stages.values())
    return run


def _sample(pid: int, run: WatchedRun) -> None:
    """Add what /proc says of the process to its current stage until it has ended."""
    before = time.monotonic()
    while sizes := memory_of(pid):
        stage = run.stages[run.stderr[-1] if run.stderr else _START]
        stage.resident = max(stage.resident, sizes["VmRSS"])
        stage.anonymous = max(stage.anonymous, sizes["RssAnon"])
        run.peak_resident = sizes["VmHWM"]
        now = time.monotonic()
        stage.seconds += now - before
        before = now
        time.sleep(_PERIOD_S)
