"""Wide beams under a trie: memory by width; drafts and other requests must not change results.

Each of BUNDLES searches and samples item ids after prompts of 256 tokens, as in lab/run peers
--compare retrieval. Every setting runs in a separate process: requests one after another and all in
the same engine calls, both without and with speculation. The command fails if any of the W
sequences of a request differs between settings, or is not an id.
"""

import tempfile
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from dsbd_ort import TokenTrie
from dsbd_ort.benchmark.report import precision_name
from dsbd_runtime.bundle_files.bundle import TOKENIZER_FILE, Bundle, open_bundle
from lab.frame.own_process import in_own_process
from lab.frame.page import BUNDLES, RESULTS, Page, writes
from lab.peers.ids import LENGTH, Ids
from lab.peers.retrieval import NUM_IDS, PROMPT_LENGTH, retrieval_prompts
from lab.retrieval.wide_requests import cells_of, computed, settings_of
from scripts.document_sections import table

SECTION = "retrieval memory"
WIDTHS = (32, 64, 128, 256, 512)
PAIRS = (("beam-search", "speculative-beam-search"), ("beam-sample", "dsbd"))
COLUMNS = (
    *("strategy / with speculation", "W", "alone", "with speculation", "together", "both"),
    *("the same with speculation", "together", "both"),
)


def table_of(
    bundle: Bundle, widths: tuple[int, ...], num_prompts: int, num_ids: int, threads: int
) -> tuple[list[str], list[str]]:
    """Return the lines of a bundle's table, and the names of rows with wrong results."""
    tokenizer = Tokenizer.from_file(str(bundle.path / TOKENIZER_FILE))
    prompts = [prompt.token_ids for prompt in retrieval_prompts(tokenizer, num_prompts)]
    cases = [(pair, width) for pair in PAIRS for width in widths]
    rows, wrong = [], []
    with tempfile.TemporaryDirectory() as folder:
        trie_file = Path(folder) / "ids.trie"
        ids = Ids.written(Path(folder), num_ids, tokenizer.get_vocab_size())
        TokenTrie.from_array(np.load(ids.file)).save(trie_file)
        for pair, width in track(cases, bundle.path.name, console=Console(stderr=True)):
            computed_settings = [
                in_own_process(computed, bundle.path, trie_file, prompts, setting, threads)
                for setting in settings_of(pair, width)
            ]
            cells, is_right = cells_of(computed_settings, ids)
            rows.append((" / ".join(pair), str(width), *cells))
            if not is_right:
                wrong.append(f"{bundle.path.name}, {' / '.join(pair)}, W={width}")
    return table(COLUMNS, rows), wrong


@click.command(help=__doc__)
@BUNDLES
@click.option(
    "--width",
    "widths",
    type=click.IntRange(min=2),
    multiple=True,
    default=WIDTHS,
    show_default=True,
)
@click.option("--num-prompts", type=click.IntRange(1, 8), default=4, show_default=True)
@click.option("--num-ids", default=NUM_IDS, show_default=True)
@writes(RESULTS / "retrieval.md", is_timed=False)
def main(
    bundles: tuple[Path, ...],
    widths: tuple[int, ...],
    num_prompts: int,
    num_ids: int,
    page: Page,
) -> None:
    """Measure and write the tables into the page; fail if results are wrong."""
    page.begin(SECTION)
    lines: list[str] = []
    wrong: list[str] = []
    for path in bundles:
        bundle = open_bundle(path)
        entry = bundle.entry("target")
        name = f"`{path.name}`, {precision_name(entry)}, logits {entry.logits}"
        rows, others = table_of(bundle, widths, num_prompts, num_ids, page.threads)
        lines += [""] * bool(lines)
        lines += [f"{name}: MB of the process at its peak, and of the caches.", "", *rows]
        wrong += others
    details = f"{num_prompts} prompts of {PROMPT_LENGTH} tokens, {num_ids:,} ids of {LENGTH} tokens"
    page.write(SECTION, lines, details)
    if wrong:
        raise click.ClickException("other sequences or illegal ids: " + "; ".join(wrong))
