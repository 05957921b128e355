"""The comparison of drafting without a model: copying and free text, by one beam and by more."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from dsbd_ort.benchmark.prompts import PROMPTS
from lab.frame.copying_prompts import copying_prompts
from lab.peers.catalog import OURS, PRECISIONS, TOP_K, PeerRun, peer_of
from lab.peers.rounds import Prompt

COPYING, FREE = "copying", "free text"
SAMPLED: dict[str, Any] = {"top_k": TOP_K, "temperature": 0.7}
WIDTHS = (2, 4)
UNDRAFTED, NGRAM = "no draft", "ngram"
ONE_BEAM, SEARCH = "W=1", "W=4, beam search"


def drafting_prompts(tokenizer: Tokenizer, num_prompts: int) -> list[Prompt]:
    """Return the first prompts of both kinds of work."""
    works = {COPYING: copying_prompts(), FREE: list(PROMPTS)}
    return [
        Prompt(token_ids=tokenizer.encode(text).ids, work=work)
        for work, texts in works.items()
        for text in texts[:num_prompts]
    ]


def _ours(precision: str) -> tuple[PeerRun, ...]:
    """Return our rows: each shape without a draft and with the n-gram drafter."""
    shapes: dict[str, dict[str, Any]] = {ONE_BEAM: {"strategy": "speculative", **SAMPLED}}
    for width in WIDTHS:
        shapes[f"W={width}"] = {"strategy": "dsbd", "num_beams": width, **SAMPLED}
    shapes[SEARCH] = {"strategy": "speculative-beam-search", "num_beams": 4}
    drafts = {UNDRAFTED: {"drafter": "none"}, NGRAM: {"drafter": "ngram"}}
    return tuple(
        PeerRun(
            name=f"{shape}, {draft}",
            precision=precision,
            task="sampling",
            options={**options, **drafter},
            undrafted=None if draft == UNDRAFTED else f"{shape}, {UNDRAFTED}",
            same_tokens_as=None if draft == UNDRAFTED else f"{shape}, {UNDRAFTED}",
        )
        for shape, options in shapes.items()
        for draft, drafter in drafts.items()
    )


def _theirs(precision: str, lookup: str) -> tuple[PeerRun, ...]:
    """Return the rows of a tool whose drafting without a model is called ``lookup``."""
    sampling = f"{ONE_BEAM}, {UNDRAFTED}"
    beams = {"num_beams": 4, "do_sample": False}
    search: dict[str, Any] = {"precision": precision, "options": beams}
    return (
        PeerRun(
            name=sampling,
            precision=precision,
            task="sampling",
            options=SAMPLED,
            counterpart=sampling,
        ),
        PeerRun(
            name=f"{ONE_BEAM}, {lookup}",
            precision=precision,
            task="lookup",
            options=SAMPLED,
            counterpart=f"{ONE_BEAM}, {NGRAM}",
            undrafted=sampling,
        ),
        PeerRun(
            name=f"{SEARCH}, {UNDRAFTED}",
            task="beam-search",
            counterpart=f"{SEARCH}, {NGRAM}",
            same_tokens_as=f"{SEARCH}, {UNDRAFTED}",
            **search,
        ),
        PeerRun(
            name=f"{SEARCH}, {lookup}",
            task="lookup",
            counterpart=f"{SEARCH}, {NGRAM}",
            undrafted=f"{SEARCH}, {UNDRAFTED}",
            same_tokens_as=f"{SEARCH}, {UNDRAFTED}",
            **search,
        ),
    )


def _of(lookup: str, precisions: tuple[str, ...] = PRECISIONS) -> tuple[PeerRun, ...]:
    return tuple(run for precision in precisions for run in _theirs(precision, lookup))


DRAFTING_PEERS = (
    peer_of(OURS, tuple(run for precision in PRECISIONS for run in _ours(precision))),
    peer_of("transformers", _of("prompt lookup", ("fp32",))),
    peer_of("onnxruntime-genai", _of("n-gram")),
    peer_of("openvino-genai", _of("prompt lookup")),
)
