"""What sources cost that share an engine call: together, one call each, one alone.

Of every encoder-decoder's BUNDLE the target makes calls of ROWS siblings for each of some sources,
behind as many rows of a target: all sources in one call, and each in a call of its own. In the last
rows of the table one source is as long as the encoder reads, the others are short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import onnxruntime as ort
from rich.progress import track

from dsbd_forward.forward import Forward, joined_forward
from dsbd_forward.rows import NO_INTS
from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.loading import load_causal_lm
from lab.frame.page import BUNDLES, RESULTS, Page, ratio_cell, spread_cell, writes
from lab.frame.rounds import Timings, time_in_rounds
from scripts.document_sections import table

SECTION = "shared-sources"
TOGETHER, APART = "together", "apart"
NUM_SOURCES, SHORT = (1, 2, 4, 8), 24
CALLS_A_ROUND = 3
COLUMNS = ("tokens of a source", "sources", "rows of each", "apart, ms", "together, ms", "gain")


@dataclass(frozen=True)
class Setting:
    """The sources of a call, and the rows that read each.

    Attributes:
        lengths: tokens of each source.
        rows: of each source in a call.
        behind: rows of the cache that each of these sees.
    """

    lengths: tuple[int, ...]
    rows: int
    behind: int

    @property
    def cells(self) -> tuple[str, str, str]:
        """What the table says of it."""
        lengths = " and ".join(map(str, sorted(set(self.lengths), reverse=True)))
        return lengths, str(len(self.lengths)), str(self.rows)


class SourceCalls:
    """Calls of an engine whose cache has rows of every source; they leave it as it was."""

    def __init__(self, model: CausalLM, setting: Setting, vocab_size: int) -> None:
        rng = np.random.default_rng(0)
        self._model, self._setting = model, setting
        sources = [tuple(rng.integers(3, vocab_size, n).tolist()) for n in setting.lengths]
        self._sources = list(dict.fromkeys(sources))
        model.keep(np.arange(0))
        for source in self._sources:
            first = model.num_rows
            mask = np.zeros((setting.behind, first + setting.behind), np.bool_)
            mask[:, first:] = np.tri(setting.behind, dtype=np.bool_)
            tokens = rng.integers(3, model.spec.vocab_size, setting.behind)
            model.forward(Forward(tokens, np.arange(setting.behind), mask, NO_INTS, source=source))
        self._before = np.arange(model.num_rows)

    def together(self) -> None:
        """Make the rows of all sources in one call."""
        first = self._model.num_rows
        rows = self._setting.rows
        forwards = [
            self._siblings(number, first + number * rows) for number in range(len(self._sources))
        ]
        self._model.forward(joined_forward(forwards))
        self._model.keep(self._before)

    def apart(self) -> None:
        """Make the rows of each source in a call of its own."""
        for number in range(len(self._sources)):
            self._model.forward(self._siblings(number, self._model.num_rows))
        self._model.keep(self._before)

    def _siblings(self, number: int, first_row: int) -> Forward:
        behind, rows = self._setting.behind, self._setting.rows
        mask = np.zeros((rows, first_row + rows), np.bool_)
        mask[:, number * behind : (number + 1) * behind] = True
        mask[:, first_row:] = np.eye(rows, dtype=np.bool_)
        positions = np.full(rows, behind)
        every = np.arange(rows)
        return Forward(every + 3, positions, mask, every, source=self._sources[number])


def settings(bundle: Bundle, rows: int, behind: int) -> Iterator[Setting]:
    """Yield what is measured of a bundle."""
    encoder = bundle.entry("target").encoder
    if encoder is None:
        raise click.UsageError(f"{bundle.path} is no encoder-decoder's; expected one")
    longest = min(encoder.context_length, bundle.entry("target").context_length)
    for length in sorted({min(SHORT, longest), longest}):
        for number in NUM_SOURCES:
            yield Setting((length,) * number, rows, behind)
    yield Setting((longest, *[min(SHORT, longest)] * (NUM_SOURCES[-1] - 1)), rows, behind)


def measured(
    bundle: Bundle, asked: list[Setting], threads: int, rounds: int
) -> Iterator[tuple[Setting, Timings]]:
    """Yield the times of every setting."""
    encoder = bundle.entry("target").encoder
    assert encoder is not None  # see ``settings``
    # An engine each, since rows that have once been in slots are read there.
    with (
        load_causal_lm(bundle, "target", settings=EngineSettings(num_threads=threads)) as one,
        load_causal_lm(bundle, "target", settings=EngineSettings(num_threads=threads)) as other,
    ):
        for setting in track(asked, description=bundle.path.name, transient=True):
            calls: dict[str, Callable[[], None]] = {
                TOGETHER: SourceCalls(one, setting, encoder.vocab_size).together,
                APART: SourceCalls(other, setting, encoder.vocab_size).apart,
            }
            yield setting, time_in_rounds(calls, num_rounds=rounds, calls_a_round=CALLS_A_ROUND)


@click.command(help=__doc__)
@BUNDLES
@click.option("--rows", default=12, show_default=True, help="Of each source in a call.")
@click.option("--behind", default=16, show_default=True, help="Rows of a target before them.")
@click.option("--rounds", default=5, show_default=True)
@writes(RESULTS / "serving.md")
def main(bundles: tuple[Path, ...], rows: int, behind: int, rounds: int, page: Page) -> None:
    """Measure every bundle and write the section."""
    opened = [open_bundle(path) for path in bundles]
    asked = [(bundle, list(settings(bundle, rows, behind))) for bundle in opened]
    page.begin(SECTION)
    lines: list[str] = []
    for bundle, of_bundle in asked:
        cells = []
        for setting, found in measured(bundle, of_bundle, page.threads, rounds):
            both = (spread_cell(found.milliseconds(name)) for name in (APART, TOGETHER))
            cells.append((*setting.cells, *both, ratio_cell(found.ratio(APART, TOGETHER))))
        lines += [f"### `{bundle.path.name}`", "", *table(COLUMNS, cells), ""]
    details = f"medians with quartiles over {rounds} rounds of {CALLS_A_ROUND} calls"
    page.write(SECTION, lines[:-1], f"onnxruntime {ort.__version__}", details)
