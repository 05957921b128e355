"""Times of forwards after a full cache: one bundle, opened with each of a GPU's settings.

The settings take turns. Every bundle has the same forwards, so that bundles of the same model can
be compared too. ``choices.py`` evaluates the times.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dsbd_forward.forward import Forward, ForwardResult
from dsbd_forward.spec import EngineSpec
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.loading import load_causal_lm
from lab.frame.rounds import time_in_rounds, turn

AS_IT_IS = "as it is"
SETTINGS = {
    AS_IT_IS: EngineSettings(),
    "--no-cuda-graphs": EngineSettings(cuda_graphs=False),
}
"""Settings with which a model is opened on CUDA, by the option of a command."""

DECODING_ROWS = (1, 8, 36)
PROMPT_ROWS = 256
PADDED_TO_40, PADDED_TO_64 = "36 rows padded to 40", "36 rows padded to 64"
PADDING_SEES_ITSELF = "36 rows padded to 64, padding sees itself alone"
MOST_PREFIX_ROWS = 1000

_MOST_LOGIT_ROWS = 32
_NUM_OPENINGS, _NUM_ROUNDS, _CALLS_A_ROUND = 2, 2, 15


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


def rows_name(num_rows: int) -> str:
    """Return the name of a forward with ``num_rows`` rows and no padding."""
    return "1 row" if num_rows == 1 else f"{num_rows} rows"


def forwards_after(num_cached: int, vocab_size: int) -> dict[str, Forward]:
    """Return the timed forwards after ``num_cached`` rows, by name.

    Padding is part of the forwards, so that every way of padding runs on the same engine. Padding
    rows are the last rows. They see column 0 and themselves, or only themselves, and have no
    logits.
    """
    plain = {rows_name(n): (n, n, True) for n in (*DECODING_ROWS, PROMPT_ROWS)}
    padded = {
        PADDED_TO_40: (36, 40, True),
        PADDED_TO_64: (36, 64, True),
        PADDING_SEES_ITSELF: (36, 64, False),
    }
    return {
        name: _forward(num_cached, vocab_size, *rows) for name, rows in {**plain, **padded}.items()
    }


def _forward(
    num_cached: int, vocab_size: int, num_rows: int, num_padded: int, padding_sees_first: bool
) -> Forward:
    rng = np.random.default_rng(num_padded)
    mask = np.zeros((num_padded, num_cached + num_padded), np.bool_)
    mask[:num_rows, : num_cached + num_rows] = np.tri(num_rows, num_cached + num_rows, num_cached)
    padding = np.arange(num_rows, num_padded)
    mask[padding, num_cached + padding] = True
    mask[padding, 0] = padding_sees_first
    positions = num_cached + np.minimum(np.arange(num_padded), num_rows - 1)
    return Forward(
        token_ids=rng.integers(0, vocab_size, num_padded),
        positions=positions,
        mask=mask,
        logit_rows=np.arange(min(num_rows, _MOST_LOGIT_ROWS)),
    )


def milliseconds_of(
    model: Model, *, num_rounds: int = _NUM_ROUNDS, calls_a_round: int = _CALLS_A_ROUND
) -> dict[str, float]:
    """Return the median time of every forward that fits into the context."""
    vocab_size = model.spec.vocab_size
    num_cached = min(MOST_PREFIX_ROWS, model.context_length // 2)
    cached = np.arange(num_cached)
    model.forward(
        Forward(
            token_ids=cached % vocab_size,
            positions=cached,
            mask=np.tri(num_cached, dtype=np.bool_),
            logit_rows=np.arange(1),
        )
    )

    def call(forward: Forward) -> None:
        model.forward(forward)
        model.keep(cached)

    calls: dict[str, Callable[[], None]] = {
        name: partial(call, forward)
        for name, forward in forwards_after(num_cached, vocab_size).items()
        if forward.positions[-1] < model.context_length
    }
    for each in calls.values():  # recorded calls are replayed from the third run of a size on
        each()
        each()
    timings = time_in_rounds(calls, num_rounds=num_rounds, calls_a_round=calls_a_round)
    return {name: timings.milliseconds(name).median for name in calls}


def by_setting(
    settings: Mapping[str, EngineSettings], open_with: Callable[..., Any], **repeats: int
) -> dict[str, dict[str, float]]:
    """Return the times by setting; models take turns and are opened, timed and closed twice."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
    for number in range(_NUM_OPENINGS):
        for name in turn(list(settings), number):
            with open_with(settings=settings[name]) as model:
                runs[name].append(milliseconds_of(model, **repeats))
    return {
        name: {call: statistics.mean(time[call] for time in times) for call in times[0]}
        for name, times in runs.items()
    }


def main() -> None:
    """Time the target of a bundle; print the milliseconds and write them to ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--provider", required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    settings = SETTINGS if options.provider == "cuda" else {AS_IT_IS: SETTINGS[AS_IT_IS]}
    bundle = open_bundle(options.bundle)
    open_with = partial(load_causal_lm, bundle, "target", provider=options.provider)
    result = {
        "provider": options.provider,
        "quantization": bundle.entry("target").quantization,
        "milliseconds": by_setting(settings, open_with),
    }
    text = json.dumps(result, indent=1)
    print(text)
    options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
