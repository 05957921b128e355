"""Comparisons of lab/run peers: the tools and the table of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from dsbd_ort.benchmark.bench_run import PROMPTS
from lab.frame.twins import TOP_LOGITS
from lab.peers.catalog import PEERS, Peer
from lab.peers.ids import LENGTH
from lab.peers.retrieval import (
    NUM_IDS,
    WIDTHS,
    retrieval_bars,
    retrieval_peers,
    retrieval_prompts,
    retrieval_warm_up,
)
from lab.peers.rounds import Prompt
from lab.peers.schemas import SCHEMA_PEERS, schema_prompts, schema_warm_up
from lab.peers.summary import BARS, Bar

STRATEGIES, RETRIEVAL = "strategies", "retrieval"
_WARM_UP = "def close(self, force=False):"  # not one of the prompts


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One comparison.

    Attributes:
        name: its value of ``--compare``.
        section: name of its section of the page.
        peers: the tools, dsbd-ort first.
        prompts: returns the first n prompts, encoded by the pair's tokenizer.
        warm_up: returns the request before them, which is not counted.
        columns: columns of its table.
        note: last sentences of the paragraph below the table.
        bars: target ratios.
        max_new_tokens: of a request, unless the command has another value.
        num_ids: number of ids to search; 0: none.
        logits: head of our bundles, as in --logits.
        subject: what is compared, for the paragraph below the table.
    """

    name: str
    section: str
    peers: tuple[Peer, ...]
    prompts: Callable[[Tokenizer, int], list[Prompt]]
    warm_up: Callable[[Tokenizer], Prompt]
    columns: tuple[str, ...]
    note: str
    bars: tuple[Bar, ...] = ()
    max_new_tokens: int = 48
    num_ids: int = 0
    logits: str = TOP_LOGITS
    subject: str = "{params} twin"


def next_to_busy(comparison: Comparison) -> Comparison:
    """Return the comparison for a machine on which another process takes a core.

    It has another section, and the target ratios are 1: no slower than any tool.
    """
    bars = tuple(replace(bar, aim=1.0) for bar in comparison.bars)
    return replace(comparison, section=f"{comparison.section}, busy", bars=bars)


def retrieval(widths: Sequence[int]) -> Comparison:
    """Return the comparison of retrieval for these beam widths."""
    return Comparison(
        name=RETRIEVAL,
        section="peers, retrieval",
        peers=retrieval_peers(widths),
        prompts=retrieval_prompts,
        warm_up=retrieval_warm_up,
        columns=(
            *("tool", "version", "precision", "what it did", "ms a request", "legal ids/s"),
            *("illegal", "times as fast as its own without", "their time / ours"),
            *("peak memory, MB", "same sequences, scores"),
        ),
        note=f"{NUM_IDS:,} ids of {LENGTH} tokens, made by a seed. All W sequences are returned, "
        "and counted.",
        bars=retrieval_bars(widths),
        max_new_tokens=LENGTH,
        num_ids=NUM_IDS,
        logits="topk:64",
    )


def _prompts(tokenizer: Tokenizer, num_prompts: int) -> list[Prompt]:
    return [Prompt(token_ids=tokenizer.encode(text).ids) for text in PROMPTS[:num_prompts]]


def _warm_up(tokenizer: Tokenizer) -> Prompt:
    return Prompt(token_ids=tokenizer.encode(_WARM_UP).ids)


COMPARISONS = {
    comparison.name: comparison
    for comparison in (
        Comparison(
            name=STRATEGIES,
            section="peers",
            peers=PEERS,
            prompts=_prompts,
            warm_up=_warm_up,
            columns=(
                *("tool", "version", "precision", "what it did", "tokens/s"),
                *("ours / theirs", "mean log-probability", "peak memory, MB", "same tokens"),
            ),
            note="No end token: every sequence has the full length, so length penalties and "
            "early stopping decide nothing.",
            bars=BARS,
        ),
        Comparison(
            name="schemas",
            section="peers, schemas",
            peers=SCHEMA_PEERS,
            prompts=schema_prompts,
            warm_up=schema_warm_up,
            columns=(
                *("tool", "version", "precision", "what it did", "tokens/s", "new tokens"),
                *("valid", "ours / theirs", "peak memory, MB", "same tokens"),
            ),
            note="A document that is not whole by then is not valid. Times include the "
            "compilation of the schema.",
        ),
        retrieval(WIDTHS),
    )
}
