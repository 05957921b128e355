"""CPU time of a layer over all logits, in the native library and in Python, in turn.

PROGRAM is ``tests/law_bench`` of a build with -DDSBD_NATIVE_TESTS=ON; its source describes a layer.
Both must choose the same candidates.
"""

import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from dsbd_forward.logits import DenseLogits
from dsbd_forward.spec import EngineSpec, HeadSpec
from dsbd_ort.benchmark.bootstrap import spread
from dsbd_ort.decoding.computed_distributions import ComputedDistributions
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.joint_distribution import JointDistribution, best_candidates
from dsbd_ort.decoding.rejection_coupling import RandomSource, RejectionCoupling
from dsbd_ort.decoding.sample_rule import GumbelCoupling
from dsbd_ort.decoding.warp import Warp
from lab.frame.page import RESULTS, Page, ratio_cell, writes
from scripts.document_sections import table

KINDS = ("target", "draft", "scores", "rejection", "joint")
NUM_BEAMS, NUM_DRAWS, DEPTH = 4, 6, 5
COLUMNS = "vocabulary", "rows", "layer", "native, us", "Python, us", "Python / native"


class Layer:
    """The layer of the native program, built in Python."""

    def __init__(self, values: np.ndarray) -> None:
        num_rows, vocab_size = values.shape
        self._logits, none = DenseLogits(values), np.zeros(1)
        self._spec = EngineSpec(vocab_size=vocab_size, head=HeadSpec())
        self._forest = Forest(1, 0, 7, frozenset())
        self._nodes = np.zeros(num_rows, np.int64)
        for row in range(num_rows):
            one = JointDistribution(
                np.array([0]), np.array([0]), np.array([row]), none, none, none, 0
            )
            self._nodes[row] = self._forest.descend(one, np.array([0]))[0]
        self._forest.slots[0][self._nodes] = self._nodes + 1
        self._distributions = ComputedDistributions(
            "target", self._spec, self._forest, Warp(1.0, 0, 1.0), None
        )
        # a row of an earlier layer
        self._distributions.append(self._logits.part(slice(0, 1)), self._nodes[:1], 1)
        self._weights = np.arange(num_rows) * np.float64(-0.1)
        self._gumbel = GumbelCoupling(self._forest, False)

    def chosen(self, kind: str) -> Any:
        self._distributions.keep(np.array([1]))
        self._distributions.append(self._logits, self._nodes, 2)
        joint = self._distributions.joint(self._nodes, self._weights, None)
        if kind == "joint":
            return best_candidates(joint.log_masses, NUM_DRAWS).tolist()
        if kind == "rejection":
            coupling = RejectionCoupling(RandomSource(np.random.default_rng(7)), False)
            return coupling.propose(joint, NUM_DRAWS, DEPTH).tolist()
        number = NUM_BEAMS if kind == "target" else NUM_DRAWS
        return best_candidates(self._gumbel.scores(joint, DEPTH), number).tolist()

    def timed(self, kind: str, repeats: int) -> tuple[float, list[int]]:
        """Return the microseconds of the fastest repeat, and the candidates."""
        fastest, chosen = np.inf, list[int]()
        for _ in range(repeats):
            began = time.process_time()
            chosen = self.chosen(kind)
            fastest = min(fastest, time.process_time() - began)
        return 1e6 * fastest, chosen


def measured(program: Path, values: np.ndarray, kind: str, rounds: int) -> tuple[str, ...]:
    """Return the cells of a kind of layer: medians over the rounds."""
    repeats, layer = 5, Layer(values)
    times = ([], [])  # type: tuple[list[float], ...]
    with tempfile.NamedTemporaryFile() as file:
        values.tofile(file.name)
        sizes = (str(size) for size in values.shape[::-1])
        command = [str(program), file.name, *sizes, kind, str(repeats)]
        for _ in range(rounds):
            native, *others = subprocess.check_output(command, text=True).split()
            python, chosen = layer.timed(kind, repeats)
            if [int(each) for each in others] != chosen:
                raise click.ClickException(f"{kind}: other candidates")
            times[0].append(float(native))
            times[1].append(python)
    ratio = ratio_cell(spread([b / a for a, b in zip(*times, strict=True)]))
    return kind, *(f"{spread(each).median:.0f}" for each in times), ratio


@click.command(help=__doc__)
@click.argument("program", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--rounds", default=5, show_default=True)
@click.option("--vocabulary", "sizes", multiple=True, default=(4096, 50_000, 150_000))
@click.option("--rows", multiple=True, default=(1, 4, 13))
@writes(RESULTS / "host_time.md", is_timed=False)
def main(
    page: Page, program: Path, rounds: int, sizes: tuple[int, ...], rows: tuple[int, ...]
) -> None:
    """Measure and write the table into the section "native-laws" of the page."""
    page.begin("native-laws")
    rows_of_table = list[tuple[str, ...]]()
    for vocab_size in sizes:
        for num_rows in rows:
            rng = np.random.default_rng(vocab_size)
            values = rng.normal(0.0, 2.5, (num_rows, vocab_size)).astype(np.float32)
            cells = (measured(program, values, kind, rounds) for kind in KINDS)
            rows_of_table += [(f"{vocab_size:,}", str(num_rows), *each) for each in cells]
    page.write("native-laws", table(COLUMNS, rows_of_table))


if __name__ == "__main__":
    main()
