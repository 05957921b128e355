"""Times of a target's forwards by rows of the forward and rows in the cache."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dsbd_forward.forward import Forward, ForwardResult
from dsbd_forward.spec import EngineSpec
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.loading import load_causal_lm
from lab.frame.rounds import time_in_rounds
from lab.gpu.runner import write_json
from lab.gpu.settings import CACHED_ROWS

NUM_ROWS = (1, 8, 36, 256)  # of a forward: decoding, and a part of a prompt
_FILLED_ROWS = 1000  # of a forward that fills the cache
_MOST_LOGIT_ROWS = 32
_NUM_ROUNDS, _CALLS_A_ROUND = 4, 5


class Model(Protocol):
    """The timed interface; ``CausalLM`` implements it."""

    spec: EngineSpec

    @property
    def context_length(self) -> int:
        """Number of positions."""

    def forward(self, forward: Forward) -> ForwardResult:
        """Append rows."""

    def keep(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Keep rows."""


def milliseconds_of(
    model: Model,
    num_cached: int,
    *,
    num_rounds: int = _NUM_ROUNDS,
    calls_a_round: int = _CALLS_A_ROUND,
) -> dict[int, float]:
    """Return the median time after ``num_cached`` rows, by rows of the forward."""
    vocab_size, cached = model.spec.vocab_size, np.arange(num_cached)

    def append(positions: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        num_new, num_seen = len(positions), int(positions[0])
        model.forward(
            Forward(
                token_ids=positions % vocab_size,
                positions=positions,
                mask=np.tri(num_new, num_seen + num_new, num_seen, dtype=np.bool_),
                logit_rows=np.arange(min(num_new, _MOST_LOGIT_ROWS)),
            )
        )

    def call(num_rows: int) -> None:
        append(np.arange(num_cached, num_cached + num_rows))
        model.keep(cached)

    model.keep(cached[:0])
    for part in np.split(cached, range(_FILLED_ROWS, num_cached, _FILLED_ROWS)):
        append(part)
    calls: dict[str, Callable[[], None]] = {
        str(num_rows): partial(call, num_rows)
        for num_rows in NUM_ROWS
        if num_cached + num_rows <= model.context_length
    }
    for each in calls.values():  # recorded calls are replayed from the third run of a size on
        each()
        each()
    timings = time_in_rounds(calls, num_rounds=num_rounds, calls_a_round=calls_a_round)
    return {int(name): timings.milliseconds(name).median for name in calls}


def cells_of(times: dict[int, float], num_cached: int) -> Sequence[str]:
    """Return the cells of a row: cached rows, then the time of each forward."""
    cells = (f"{times[rows]:.3f}" if rows in times else "-" for rows in NUM_ROWS)
    return (f"{num_cached:,}", *cells)


def main() -> None:
    """Time the target of a bundle after every number of cached rows; write ``--json`` each time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--provider", required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    bundle = open_bundle(options.bundle)
    with load_causal_lm(bundle, "target", provider=options.provider) as model:
        fitting = [rows for rows in CACHED_ROWS if rows < model.context_length]
        for num_cached in fitting or [model.context_length // 2]:
            rows.append(cells_of(milliseconds_of(model, num_cached), num_cached))
            print(*rows[-1], flush=True)
            write_json(options.json, {"provider": options.provider, "rows": rows})


if __name__ == "__main__":
    main()
