"""The first page: its output, and that it says the truth about beam sampling."""

import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from dsbd_ort.decoding import decode

FILE = Path(__file__).parents[2] / "examples" / "minimal.py"
PRINTED = """\
 -1.952  the dog ran .  (eos)
 -4.946  the dog ran the dog sat .  (eos)
 -2.732  the dog sat .  (eos)
2 iterations, each of which commits one bonus layer
4 of 8 drafted layers accepted
11 of 23 drafted nodes accepted
2 calls of the target, 8 of the draft
"""


def test_its_output():
    run = subprocess.run([sys.executable, str(FILE)], check=True, capture_output=True, text=True)
    assert run.stdout == PRINTED


def test_beam_sample_returns_the_same_in_more_calls_of_the_target():
    page = runpy.run_path(str(FILE))
    config = replace(page["config"], strategy="beam-sample", draft_length=None, draft_beams=None)
    target, rng = page["model"](page["TARGET"]), np.random.default_rng(2)
    plain = decode(target, None, page["prompt"], config, rng)
    assert plain.sequences == page["result"].sequences
    assert plain.stats.target_calls > page["result"].stats.target_calls
