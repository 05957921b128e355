"""Cost of constraints: steps of item tries, and of JSON schemas over a large vocabulary.

Tries are made of random items, each in a separate process. Grammars are JSON schemas; four beams
follow random documents, and the parents of each step are random. Their tokenizer is trained once
(about two minutes) and kept in build/.
"""

import time
from pathlib import Path

import click
import numpy as np
from rich.progress import track

from dsbd_ort.constraints import GrammarTokenizer
from lab.constraints.grammars import EOS, NUM_STATES, SCHEMAS, grammar_times, large_tokenizer
from lab.constraints.tries import trie_costs
from lab.frame.page import BUILD, RESULTS, Page, writes
from scripts.document_sections import table

BEAMS = 64
ITEMS = ((10**6, 3, 8192), (10**7, 3, 8192), (10**6, 4, 256), (10**7, 4, 256))
TRIE_COLUMNS = (
    "items",
    "tokens of an item",
    "nodes",
    "built, s",
    "more memory meanwhile, MB",
    "size, MB",
    "mapped, ms",
    f"a step of {BEAMS} states at each depth, ms (tokens listed)",
)
GRAMMAR_COLUMNS = ("JSON schema", "compiled, ms", "steps", "median, ms", "90 %, ms", "99 %, ms")
DEPTHS = (64, 2048)


def trie_rows() -> list[tuple[str, ...]]:
    """Return a row for each set of items."""
    rows: list[tuple[str, ...]] = []
    for num_items, num_tokens, num_codes in track(ITEMS, description="tries", transient=True):
        costs = trie_costs(num_items, num_tokens, num_codes, BEAMS)
        steps = zip(costs.step_us, costs.num_allowed, strict=True)
        rows.append(
            (
                f"{num_items:,}",
                f"{num_tokens} of {num_codes:,} codes",
                f"{costs.num_nodes:,}",
                f"{costs.build_s:.2f}",
                f"{costs.build_bytes / 1e6:.0f}",
                f"{costs.num_bytes / 1e6:.0f}",
                f"{1e3 * costs.map_s:.1f}",
                ", ".join(f"{us / 1e3:.3f} ({count:,})" for us, count in steps),
            )
        )
    return rows


def grammar_tables(vocab_size: int, file: Path, num_rounds: int) -> list[str]:
    """Return the table of schemas, and times at different depths."""
    tokenizer = large_tokenizer(vocab_size, file)
    begin = time.perf_counter()
    end = tokenizer.token_to_id(EOS)
    assert end is not None
    grammars = GrammarTokenizer(tokenizer.to_str(), vocab_size=vocab_size, eos_token_ids=[end])
    opened_s = time.perf_counter() - begin
    rows, by_depth = [], ""
    for name in track(SCHEMAS, description="schemas", transient=True):
        timed = grammar_times(name, tokenizer, grammars, num_rounds)
        quantiles = np.quantile(timed.step_ms, (0.5, 0.9, 0.99))
        times = [f"{milliseconds:.3f}" for milliseconds in quantiles]
        rows.append((name, f"{timed.compile_ms:.1f}", f"{len(timed.step_ms):,}", *times))
        if timed.depths.max() >= max(DEPTHS):
            medians = (f"{np.median(timed.near(depth)):.3f} ms" for depth in DEPTHS)
            after = " and ".join(f"{depth:,}" for depth in DEPTHS)
            by_depth = f"Median of the {name}, up to {after} tokens: {' and '.join(medians)}."
    return [
        f"A step of {NUM_STATES} states, advance and masks, V={vocab_size:,}.",
        "",
        *table(GRAMMAR_COLUMNS, rows),
        "",
        by_depth,
        f"The tokenizer, {tokenizer.get_vocab_size():,} tokens, is made ready in {opened_s:.2f} s, "
        "once a bundle.",
    ]


@click.command(help=__doc__)
@click.option("--vocab-size", default=151_936, show_default=True)
@click.option("--rounds", default=20, show_default=True, help="Documents per schema.")
@writes(RESULTS / "constraints.md")
def main(vocab_size: int, rounds: int, page: Page) -> None:
    """Measure and write."""
    page.begin("constraints")
    grammar_lines = grammar_tables(vocab_size, BUILD / f"bpe_{vocab_size}.json", rounds)
    lines = [*table(TRIE_COLUMNS, trie_rows()), "", *grammar_lines]
    page.write("constraints", lines, f"tries: medians of 200 steps; schemas: {rounds} rounds")
