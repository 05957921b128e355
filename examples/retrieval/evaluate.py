"""Recall by beam width, with and without the trie; and recall of BM25 on the same queries.

python examples/retrieval/evaluate.py build/retrieval
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bm25 import BM25
from documents import words_of

from dsbd_ort import Pipeline, TokenTrie

QUERY_ENDS = "<id>"
DEPTHS = (1, 10, 100)
_RESAMPLES = 2000


@dataclass(frozen=True)
class Ranks:
    """Results of a search.

    Attributes:
        name: name of the search.
        ranks: (num_queries,) float64. Rank of the expected document, from 0 on; inf: not found.
        legal: share of the returned sequences that are ids.
    """

    name: str
    ranks: np.ndarray
    legal: float

    def recall(self, depth: int) -> float:
        """Return the share of queries whose document is among the first ``depth``."""
        return float((self.ranks < depth).mean())

    def interval(self, depth: int) -> tuple[float, float]:
        """Return the bounds of 95 % of the recalls of resampled queries."""
        is_found = (self.ranks < depth).astype(np.float64)
        rng = np.random.default_rng(0)
        means = is_found[rng.integers(len(is_found), size=(_RESAMPLES, len(is_found)))].mean(axis=1)
        low, high = np.quantile(means, [0.025, 0.975])
        return float(low), float(high)


def rank_of(name: str, ranked: Sequence[str]) -> float:
    """Return the rank of a name, inf if it is missing."""
    return float(ranked.index(name)) if name in ranked else np.inf


def searched(
    pipe: Pipeline,
    trie: TokenTrie,
    lines: list[dict[str, Any]],
    num_beams: int,
    *,
    uses_trie: bool,
) -> Ranks:
    """Search the ids of all queries with beam search."""
    results = pipe.generate(
        [line["query"] + QUERY_ENDS for line in lines],
        strategy="beam-search",
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_new_tokens=trie.most_tokens,
        constraint=trie if uses_trie else None,
    )
    ranks, num_legal, num_returned = [], 0, 0
    for line, result in zip(lines, results, strict=True):
        items = [trie.items_of(sequence.token_ids) for sequence in result.sequences]
        num_legal += sum(map(bool, items))
        num_returned += len(items)
        ranks.append(rank_of(line["name"], [name for each in items for name in each]))
    how = "with the trie" if uses_trie else "without"
    beams = "1 beam" if num_beams == 1 else f"{num_beams} beams"
    return Ranks(f"{beams}, {how}", np.array(ranks), num_legal / num_returned)


def by_bm25(lines: list[dict[str, Any]], queries: list[dict[str, Any]]) -> Ranks:
    """Rank the documents by BM25."""
    index, names = BM25([line["words"] for line in lines]), [line["name"] for line in lines]
    ranks = [
        rank_of(query["name"], [names[row] for row in index.ranked(words_of(query["query"]), 100)])
        for query in queries
    ]
    return Ranks("BM25", np.array(ranks), 1.0)


def table_of(searches: Sequence[Ranks], num_documents: int) -> str:
    """Return the table in Markdown; chance: recall of a random ranking of the documents."""
    depths = " | ".join(f"recall@{depth} (95 %)" for depth in DEPTHS)
    rows = [f"| search | {depths} | legal ids |", "|---" * (len(DEPTHS) + 2) + "|"]
    for search in searches:
        cells = []
        for depth in DEPTHS:
            low, high = search.interval(depth)
            cells.append(f"{search.recall(depth):.3f} ({low:.3f} to {high:.3f})")
        rows.append(f"| {search.name} | {' | '.join(cells)} | {search.legal:.1%} |")
    chance = " | ".join(f"{min(depth / num_documents, 1.0):.4f}" for depth in DEPTHS)
    return "\n".join([*rows, f"| chance | {chance} | |"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder that build.py has written")
    parser.add_argument("--num-queries", type=int, default=300)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4, 16, 64, 128])
    arguments = parser.parse_args()
    with (arguments.folder / "documents.jsonl").open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    queries = [line for line in lines if line["is_held_out"]][: arguments.num_queries]
    trie = TokenTrie.load(arguments.folder / "items.trie")
    searches = []
    with Pipeline.from_bundle(arguments.folder / "bundle") as pipe:
        for num_beams in arguments.widths:
            for uses_trie in (True, False):
                searches.append(searched(pipe, trie, queries, num_beams, uses_trie=uses_trie))
    searches.append(by_bm25(lines, queries))
    print(f"{len(lines)} documents, {len(queries)} queries that the model was never shown\n")
    print(table_of(searches, len(lines)))


if __name__ == "__main__":
    main()
