"""Timing in rounds, with a new process for every run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.frame.rounds import turn
from lab.peers.catalog import PeerError
from lab.peers.documents import Documents
from lab.peers.ids import Ids
from lab.peers.prepare import NotRun, ReadyRun
from lab.peers.runner_process import RunnerProcess
from lab.peers.runners.serve import Asked

OpenProcess = Callable[[ReadyRun, Path], RunnerProcess]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A request that every run gets.

    Attributes:
        json_schema: text of the schema for the answer; None: free text of the full length.
    """

    token_ids: list[int]
    json_schema: str | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of one run.

    Attributes:
        peer, run, precision: identify the row.
        prompt_index, round: equal for paired requests of other runs, which have the same seed.
        seconds: duration of the whole request in the runner's process.
        token_ids: new tokens of the best sequence; those of a document without its end token.
        num_iterations: iterations of the target; None if the tool does not report them.
        is_valid: whether the tokens are a valid document of the schema; None without a schema.
        sequences, scores: all returned sequences, best first, and their scores; None except in
            retrieval, and None scores if the tool does not report them.
        num_legal: number of distinct ids among the sequences; None without ids.
        logprob: mean log-probability of the tokens under the target in fp32, at temperature 1;
            None before it is computed.
        peak_bytes: peak memory of the process until then, including loading.
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
    num_iterations: int | None
    is_valid: bool | None
    peak_bytes: int
    version: str
    settings: str
    sequences: list[list[int]] | None = None
    scores: list[float] | None = None
    num_legal: int | None = None
    logprob: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Return new tokens per second of the request."""
        return len(self.token_ids) / self.seconds

    @property
    def requests_per_s(self) -> float:
        """Return requests of this duration per second."""
        return 1 / self.seconds


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The requests of every run in every round.

    Attributes:
        documents: checks answers against their schema; None if no prompt has a schema.
        ids: the ids of a search, or None.
    """

    prompts: Sequence[Prompt]
    warm_up: Prompt
    max_new_tokens: int
    num_rounds: int
    documents: Documents | None = None
    ids: Ids | None = None


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
    """Yield the requests of all rounds; a failed run is yielded once as NotRun and then left out.

    Each process first continues a warm-up prompt, which is not counted.
    """
    remaining = list(runs)
    for number in range(plan.num_rounds):
        for run in turn(tuple(remaining), number):
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
        process.generate(_asked(plan.warm_up, plan, 0))
        for index, prompt in enumerate(plan.prompts):
            seed = number * len(plan.prompts) + index
            answer = process.generate(_asked(prompt, plan, seed)) | {"is_valid": None}
            if plan.documents and prompt.json_schema is not None:
                judged = plan.documents.judged(answer["token_ids"], prompt.json_schema)
                answer["token_ids"], answer["is_valid"] = judged
            if plan.ids and answer["sequences"] is not None:
                answer["num_legal"] = plan.ids.num_legal(answer["sequences"])
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


def _asked(prompt: Prompt, plan: Plan, seed: int) -> Asked:
    return Asked(
        prompt_ids=prompt.token_ids,
        max_new_tokens=plan.max_new_tokens,
        seed=seed,
        json_schema=prompt.json_schema,
        ids_file=None if plan.ids is None else str(plan.ids.file.resolve()),
    )
