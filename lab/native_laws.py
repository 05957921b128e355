"""CPU time of a layer over all logits, in the native library and in Python, in turn.

PROGRAM is ``tests/law_bench`` of a build with -DDSBD_NATIVE_TESTS=ON; it says what a layer is. Both
must choose the same candidates.
"""

import os
import subprocess
import tempfile
import time
from pathlib import Path

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
from lab.frame.page import ratio_cell
from scripts.document_sections import table

KINDS = ("target", "draft", "scores", "rejection", "joint")
NUM_BEAMS, NUM_DRAWS, DEPTH = 4, 6, 5
PORTABLE = {"NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR"}


class Layer:
    """The beams of the program's layer."""

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
        self._forest.slots[0][self._nodes] = self._nodes
        self._weights = -0.1 * np.arange(num_rows)
        self._gumbel = GumbelCoupling(self._forest, False)

    def chosen(self, kind: str) -> list[int]:
        known = ComputedDistributions("target", self._spec, self._forest, Warp(1.0, 0, 1.0), None)
        known.append(self._logits, self._nodes, 1)
        joint = known.joint(self._nodes, self._weights, None)
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


@click.command(help=__doc__)
@click.argument("program", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--rounds", default=5, show_default=True)
@click.option("--repeats", default=5, show_default=True, help="Layers of a round.")
@click.option("--vocabulary", "sizes", multiple=True, default=(4096, 50_000, 150_000))
@click.option("--rows", multiple=True, default=(1, 4, 13))
@click.option("--kind", "kinds", multiple=True, default=KINDS)
def main(
    program: Path,
    rounds: int,
    repeats: int,
    sizes: tuple[int, ...],
    rows: tuple[int, ...],
    kinds: tuple[str, ...],
) -> None:
    """Print a table of the medians of some rounds."""
    found = []
    with tempfile.NamedTemporaryFile() as file:
        for vocab_size in sizes:
            for num_rows in rows:
                rng = np.random.default_rng(vocab_size)
                values = rng.normal(0.0, 2.5, (num_rows, vocab_size)).astype(np.float32)
                values.tofile(file.name)
                for kind in kinds:
                    ratios, layer = list[float](), Layer(values)
                    for _ in range(rounds):
                        command = [program, file.name, str(vocab_size), str(num_rows), kind]
                        done = subprocess.check_output([*command, str(repeats)], text=True).split()
                        python, chosen = layer.timed(kind, repeats)
                        if [int(each) for each in done[1:]] != chosen:
                            raise click.ClickException(f"{kind}: other candidates")
                        ratios.append(python / float(done[0]))
                    times = f"{float(done[0]):.0f}", f"{python:.0f}"
                    found.append(
                        (f"{vocab_size:,}", str(num_rows), kind, *times, ratio_cell(spread(ratios)))
                    )
    columns = "vocabulary", "rows", "layer", "native, us", "Python, us", "Python / native"
    click.echo("\n".join(table(columns, found)))


if __name__ == "__main__":
    os.environ.update(PORTABLE)
    main()
