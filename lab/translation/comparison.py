"""The comparison of a shape: which tools do what, and what they are asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lab.peers.catalog import OURS, PRECISIONS, Peer, PeerRun, peer_of
from lab.peers.comparison import Comparison
from lab.peers.rounds import Prompt
from lab.translation.shapes import Shape
from lab.translation.small_model import LONG, LONG_TARGET, Language

TASK = "translation"
WIDTH = 4
GREEDY, SEARCH = "greedy", f"beam search W={WIDTH}"
DRAFTED = {GREEDY: f"{GREEDY}, drafted", SEARCH: f"{SEARCH}, drafted"}
FIRST_TOKEN, WHOLE, LONG_SOURCE = "first token", "whole", "long source"
NUM_WORDS = 24  # of a source, beside its end
NUM_MORE = 8  # tokens more than a translation has

_BEAMS = {GREEDY: 1, SEARCH: WIDTH}


def _ours(precision: str) -> list[PeerRun]:
    runs = []
    for name, width in _BEAMS.items():
        strategy = "beam-search" if width > 1 else "greedy"
        plain: dict[str, Any] = {"strategy": strategy, "num_beams": width}
        drafted = {"strategy": "speculative-beam-search", "num_beams": width}
        drafted["draft_policy"] = "throughput"
        of_run = {"precision": precision, "task": TASK}
        runs.append(PeerRun(name=name, options=plain, **of_run))
        runs.append(
            PeerRun(
                name=DRAFTED[name],
                options=drafted,
                undrafted=name,
                same_tokens_as=name,
                **of_run,
            )
        )
    return runs


def _theirs(precision: str, option: str) -> list[PeerRun]:
    return [
        PeerRun(
            name=name,
            precision=precision,
            task=TASK,
            options={option: width},
            counterpart=name,
            same_tokens_as=name,
        )
        for name, width in _BEAMS.items()
    ]


def peers_of(precisions: tuple[str, ...]) -> tuple[Peer, ...]:
    """Return the tools, ours first."""
    ours = [run for precision in precisions for run in _ours(precision)]
    theirs = [run for precision in precisions for run in _theirs(precision, "beam_size")]
    found = [
        peer_of(OURS, tuple(ours)),
        replace(peer_of("ctranslate2", tuple(theirs)), runner="run_ctranslate2_translator"),
    ]
    if "fp32" in precisions:
        runs = tuple(_theirs("fp32", "num_beams"))
        other = replace(peer_of("transformers", runs), runner="run_transformers_translator")
        found.append(replace(other, installs=()))
    return tuple(found)


def prompts_of(shape: Shape, count: int) -> list[Prompt]:
    """Return so many sources, asked for one token and for all, and a long one."""
    generator = torch.Generator().manual_seed(7)
    language = Language(shape)
    sources = language.sentences(count, NUM_WORDS, generator)[0].tolist()
    long = language.sentences(1, LONG - 1, generator)[0].tolist()
    asked = ((FIRST_TOKEN, sources, 1), (WHOLE, sources, NUM_WORDS + NUM_MORE))
    return [
        Prompt(token_ids=source, work=work, max_new_tokens=most)
        for work, of_work, most in (*asked, (LONG_SOURCE, long, LONG_TARGET))
        for source in of_work
    ]


def warm_up_of(shape: Shape) -> Prompt:
    """Return the request before the others, which is not counted."""
    generator = torch.Generator().manual_seed(8)
    source = Language(shape).sentences(1, NUM_WORDS, generator)[0][0].tolist()
    return Prompt(token_ids=source, max_new_tokens=NUM_WORDS + NUM_MORE)


def comparison_of(shape: Shape, precisions: tuple[str, ...] = PRECISIONS) -> Comparison:
    """Return the comparison of a shape; its tables are those of ``report``."""
    return Comparison(
        name=TASK,
        section=section_of(shape),
        peers=peers_of(precisions),
        prompts=lambda _, count: prompts_of(shape, count),
        warm_up=lambda _: warm_up_of(shape),
        columns=(),
        note="",
        max_new_tokens=LONG_TARGET,
        subject=shape.name,
    )


def section_of(shape: Shape) -> str:
    """Return the name of the section of the page."""
    return f"translation {shape.name}"
