"""Catalog of the compared tools and their runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Source = Literal["bundle", "checkpoints", "conversion"]

WIDTH, TOP_K = 4, 20
# torch is installed first and alone, and pinned again in the second call: otherwise pip would
# select the newest build, with gigabytes of CUDA packages.
TORCH = "torch==2.13.0"
OURS = "dsbd-ort"
PRECISIONS = ("fp32", "int8")
QUANTIZE_BY_PRECISION = {"fp32": "none", "int8": "int8"}

DSBD, DSBD_SHAPE, DSBD_DYNAMIC = "dsbd W=4, throughput", "dsbd W=4, 2x6", "dsbd W=4, at least 2"
BEAM_SAMPLE, BEAM_SEARCH, SAMPLE = "beam-sample W=4", "beam-search W=4", "sample"
SPECULATIVE_SEARCH = "speculative-beam-search W=4, throughput"
SPECULATIVE = "speculative, throughput"


class PeerError(Exception):
    """A tool cannot be installed or run, or its conversion failed; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """One row of the comparison.

    Attributes:
        name: name of the method; with the tool and the precision it identifies the row.
        precision, task, options: see ``runners.serve.Job``.
        counterpart: our run of the same precision that does the same; None for our own runs.
        undrafted: run of the same tool and precision that does the same without a draft, or None.
        unable: why the tool cannot do this (shown in the table); then the tool is not installed.
        same_tokens_as: our run that should have the same tokens, or None.
        same_search_as: our run that must return the same sequences with the same scores, or None;
            the comparison fails if one request differs.
    """

    name: str
    precision: str
    task: str
    options: Mapping[str, Any] = field(default_factory=dict)
    counterpart: str | None = None
    undrafted: str | None = None
    unable: str | None = None
    same_tokens_as: str | None = None
    same_search_as: str | None = None


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One tool.

    Attributes:
        name: shown in its rows; also its folder below the work folder.
        runner: module in lab.peers.runners.
        source: what its runner opens: our bundle, the checkpoints themselves, or the tool's own
            conversion of them.
        installs: arguments of each ``pip install``; (): the tool runs in this environment.
        runs: its rows.
    """

    name: str
    runner: str
    source: Source
    installs: tuple[tuple[str, ...], ...] = ()
    runs: tuple[PeerRun, ...]


def _ours(precision: str) -> tuple[PeerRun, ...]:
    """Return our runs."""
    beams, sampled = {"num_beams": WIDTH}, {"top_k": TOP_K}
    planned = {"draft_policy": "throughput"}
    dsbd = {"strategy": "dsbd", **beams, **sampled}
    rows = (  # (name, task, same tokens as, options)
        (BEAM_SAMPLE, "beam-sampling", None, {"strategy": "beam-sample", **beams, **sampled}),
        (DSBD, "beam-sampling", BEAM_SAMPLE, {**dsbd, **planned}),
        (
            DSBD_SHAPE,
            "beam-sampling",
            BEAM_SAMPLE,
            {**dsbd, "width_policy": "fixed", "draft_length": 2, "draft_beams": 6},
        ),
        (
            DSBD_DYNAMIC,
            "beam-sampling",
            None,
            {**dsbd, "min_beams": 2, "draft_length": 4, "draft_beams": 4},
        ),
        (BEAM_SEARCH, "beam-search", None, {"strategy": "beam-search", **beams}),
        (
            SPECULATIVE_SEARCH,
            "beam-search",
            BEAM_SEARCH,
            {"strategy": "speculative-beam-search", **beams, **planned},
        ),
        (SAMPLE, "sampling", None, {"strategy": "sample", **sampled}),
        (SPECULATIVE, "assisted", SAMPLE, {"strategy": "speculative", **sampled, **planned}),
    )
    return tuple(
        PeerRun(name=name, precision=precision, task=task, options=options, same_tokens_as=same)
        for name, task, same, options in rows
    )


def _beam_search(precision: str, width_option: str = "num_beams") -> PeerRun:
    return PeerRun(
        name="beam search W=4",
        precision=precision,
        task="beam-search",
        options={width_option: WIDTH},
        counterpart=SPECULATIVE_SEARCH,
        same_tokens_as=BEAM_SEARCH,
    )


def _assisted(precision: str, **options: int) -> PeerRun:
    return PeerRun(
        name="sampling with a draft model",
        precision=precision,
        task="assisted",
        options={"top_k": TOP_K, **options},
        counterpart=SPECULATIVE,
    )


PEERS = (
    Peer(
        name=OURS,
        runner="run_dsbd_ort",
        source="bundle",
        runs=tuple(run for precision in PRECISIONS for run in _ours(precision)),
    ),
    Peer(
        name="transformers",
        runner="run_transformers",
        source="checkpoints",
        installs=((TORCH,), ("transformers==5.23.0", TORCH)),
        runs=(
            PeerRun(
                name="beam sampling W=4",
                precision="fp32",
                task="beam-sampling",
                options={"num_beams": WIDTH, "top_k": TOP_K},
                counterpart=DSBD,
            ),
            _beam_search("fp32"),
            _assisted("fp32"),
            PeerRun(
                name="sampling",
                precision="fp32",
                task="sampling",
                options={"top_k": TOP_K},
                counterpart=SAMPLE,
            ),
        ),
    ),
    Peer(
        name="onnxruntime-genai",
        runner="run_onnxruntime_genai",
        source="conversion",
        installs=(
            (TORCH,),
            (
                *("onnxruntime-genai==0.18.0", "onnxruntime==1.31.1", "transformers==5.23.0"),
                *("onnx==1.23.2", "onnx-ir==1.1.0", TORCH),
            ),
        ),
        runs=tuple(
            run
            for precision in PRECISIONS
            for run in (_beam_search(precision), _assisted(precision))
        ),
    ),
    Peer(
        name="ctranslate2",
        runner="run_ctranslate2",
        source="conversion",
        installs=((TORCH,), ("ctranslate2==4.8.5", "transformers==5.23.0", TORCH)),
        runs=tuple(_beam_search(precision, "beam_size") for precision in PRECISIONS),
    ),
    Peer(
        name="openvino-genai",
        runner="run_openvino_genai",
        source="conversion",
        installs=(
            (TORCH,),
            (
                *("openvino-genai==2026.4.1.0", "openvino==2026.4.1"),
                *("openvino-tokenizers==2026.4.1.0", "nncf==3.4.0", "transformers==5.5.4"),
                *("optimum==2.3.0", "requests", TORCH),
            ),
            ("--no-deps", "optimum-intel==2.2.0"),  # needs torchvision, which needs another torch
        ),
        runs=tuple(
            run
            for precision in PRECISIONS
            for run in (_beam_search(precision), _assisted(precision, num_assistant_tokens=4))
        ),
    ),
)


def peer_of(name: str, runs: tuple[PeerRun, ...]) -> Peer:
    """Return a tool of ``PEERS`` with other runs."""
    (peer,) = (peer for peer in PEERS if peer.name == name)
    return replace(peer, runs=runs)
