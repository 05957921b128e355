"""Timing: every run in a process of its own, round after round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.catalog import PeerError
from peers.prepare import NotRun, ReadyRun
from peers.runner_process import RunnerProcess

OpenProcess = Callable[[ReadyRun, Path], RunnerProcess]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of one run.

    Attributes:
        peer, run, precision: the row.
        prompt_index, round: they pair it with requests of other runs, which have the same seed.
        seconds: of the whole request, in the runner's process.
        token_ids: new tokens of the best sequence.
        peak_bytes: peak memory of the process so far, including loading.
        version, settings: reported by the runner.
    """

    peer: str
    run: str
    precision: str
    prompt_index: int
    round: int
    seed: int
    seconds: float
    token_ids: list[int]
    peak_bytes: int
    version: str
    settings: str

    @property
    def tokens_per_s(self) -> float:
        """Return new tokens per second of the request."""
        return len(self.token_ids) / self.seconds


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The requests of every run in every round."""

    prompts: Sequence[list[int]]
    warm_up: list[int]
    max_new_tokens: int
    num_rounds: int


def start_process(run: ReadyRun, log: Path) -> RunnerProcess:
    """Return the process of a run, not yet started."""
    return RunnerProcess(run.python, run.peer.runner, run.job, log)


def measure_rounds(
    runs: Sequence[ReadyRun],
    plan: Plan,
    logs: Path,
    report: Callable[[str], None],
    start: OpenProcess = start_process,
) -> Iterator[Request | NotRun]:
    """Yield the requests of all rounds; a run that fails is yielded once as NotRun and left out.

    In every round all runs come one after the other, in turn forwards and backwards, so that a
    machine that slows down slows all of them. Before the prompts of a round a process continues
    another prompt, which is not counted.
    """
    remaining = list(runs)
    for number in range(plan.num_rounds):
        for run in list(remaining) if number % 2 == 0 else remaining[::-1]:
            report(f"round {number + 1}/{plan.num_rounds}: " + ", ".join(run.key))
            try:
                yield from _one_round(run, plan, number, logs, start)
            except PeerError as error:
                remaining.remove(run)
                yield NotRun(peer=run.peer, run=run.run, reason=f"failed: {error}")


def _one_round(
    run: ReadyRun, plan: Plan, number: int, logs: Path, start: OpenProcess
) -> Iterator[Request]:
    peer, name, precision = run.key
    log = logs / f"{'-'.join(run.key)}.log".replace(" ", "-")
    with start(run, log) as process:
        opened = process.open()
        process.generate(plan.warm_up, plan.max_new_tokens, 0)
        for index, prompt_ids in enumerate(plan.prompts):
            seed = number * len(plan.prompts) + index
            answer = process.generate(prompt_ids, plan.max_new_tokens, seed)
            yield Request(
                peer=peer,
                run=name,
                precision=precision,
                prompt_index=index,
                round=number,
                seed=seed,
                **answer,
                **opened,
            )
