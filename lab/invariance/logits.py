"""Count the logits that are other bits in another way to compute a path, over 1e9 of them.

A path of each of BUNDLES is computed by one call and in random ways (ways.py), on one and on two
threads. --record keeps the counts after every path: the next call goes on where this one ended, be
it by --minutes or Ctrl-C, until --elements logits are compared.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import click
import onnxruntime as ort

from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle
from lab.frame.page import BUNDLES, RESULTS, Page, writes
from lab.invariance.kept_counts import KeptCounts, bundle_key, counted_name, kept_options
from scripts.document_sections import table
from scripts.path_ways import PathEngine, WayCount, count_differing

SECTION = "flips"
COLUMNS = ("bundle", "ways", "of them other", "logits", "of them other", "share")
NUM_TOKENS, NUM_WAYS = 150, 12  # of a path, and to compute it
_NONE_SEEN = 3.0  # of so many expected none is seen once in 20 times


def counted(kept: KeptCounts, bundle: Bundle) -> tuple[WayCount, int]:
    """Return the counts of a bundle so far, and its number of paths, which is the next seed."""
    entry = kept.get(bundle_key(bundle))
    return (WayCount(**entry["count"]), entry["num_paths"]) if entry else (WayCount(), 0)


def count(bundle: Bundle, kept: KeptCounts, num_elements: float, until: float) -> None:
    """Compare paths of the target until there are enough, or the clock says ``until``."""
    engine = PathEngine(bundle.model_path("target"), bundle.entry("target"))
    found, num_paths = counted(kept, bundle)
    while found.num_logits < num_elements and time.monotonic() < until:
        found += count_differing(engine, num_tokens=NUM_TOKENS, num_ways=NUM_WAYS, seed=num_paths)
        num_paths += 1
        kept.put(bundle_key(bundle), {"count": asdict(found), "num_paths": num_paths})


def row_of(bundle: Bundle, found: WayCount) -> tuple[str, ...]:
    """Return a row of the table; without any difference the share has a limit of 95 %."""
    share = ""
    if found.num_other_logits:
        share = f"{found.num_other_logits / found.num_logits:.1e}"
    elif found.num_logits:
        share = f"below {_NONE_SEEN / found.num_logits:.0e}"
    numbers = (found.num_ways, found.num_other_ways, found.num_logits, found.num_other_logits)
    return counted_name(bundle), *(f"{number:,}" for number in numbers), share


@click.command(help=__doc__)
@BUNDLES
@click.option("--elements", default=1e9, show_default=True, help="Logits of every bundle.")
@kept_options(minutes=10.0)
@writes(RESULTS / "invariance.md", is_timed=False)
def main(
    bundles: tuple[Path, ...], elements: float, minutes: float, record: Path, page: Page
) -> None:
    """Count, print the table and write it between the marks of the document."""
    page.begin(SECTION)
    kept = KeptCounts(record)
    rows = []
    for path in bundles:
        bundle = open_bundle(path)
        count(bundle, kept, elements, time.monotonic() + 60 * minutes)
        rows.append(row_of(bundle, counted(kept, bundle)[0]))
    details = f"onnxruntime {ort.__version__}, paths of {NUM_TOKENS} tokens"
    page.write(SECTION, table(COLUMNS, rows), details)
