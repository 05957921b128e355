"""A request's trace as one JSON object, with its texts; docs/trace.md lists the fields."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from dsbd_ort.decoding import RequestTrace, TraceIteration, TraceNode
from dsbd_ort.decoding.beams import Hypothesis
from dsbd_ort.trace_page.token_labels import token_label
from dsbd_ort.version import __version__
from dsbd_runtime.stream_decoder import TextWindow
from dsbd_runtime.tokenizer import Tokenizer

TRACE_VERSION = 1
"""Raised when a name goes or changes its meaning; a new name alone does not raise it."""


def trace_object(trace: RequestTrace, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return everything that the page shows."""
    hypotheses = _HypothesisTable(tokenizer)
    iterations = [_iteration(iteration, hypotheses) for iteration in trace.iterations]
    in_forest = {node.token for iteration in trace.iterations for node in iteration.nodes}
    in_beams = {row["token"] for row in hypotheses.rows[1:]}
    return {
        "version": TRACE_VERSION,
        "program": f"dsbd-ort {__version__}",
        "config": dataclasses.asdict(trace.config) if trace.config else None,
        "prompt": {"token_ids": trace.prompt_ids, "text": tokenizer.decode(trace.prompt_ids)},
        "labels": {token: token_label(tokenizer, token) for token in sorted(in_forest | in_beams)},
        "hypotheses": hypotheses.rows,
        "iterations": iterations,
    }


class _HypothesisTable:
    """All hypotheses of a request, each once, as rows that name the row of their parent."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.rows: list[dict[str, Any]] = [{"parent": None, "text": "", "rest": ""}]
        self._windows = [TextWindow()]
        self._index: dict[Hypothesis, int] = {}

    def index(self, hypothesis: Hypothesis) -> int:
        """Return the row of ``hypothesis``, added with its ancestors where it is new."""
        new = []
        link: Hypothesis | None = hypothesis
        while link is not None and link not in self._index and link.parent is not None:
            new.append(link)
            link = link.parent
        row = self._index.get(link, 0) if link else 0
        for link in reversed(new):
            row = self._index[link] = self._add(link, row)
        return row

    def _add(self, link: Hypothesis, parent: int) -> int:
        window, text = self._windows[parent].extended(self._tokenizer, (link.token,))
        self._windows.append(window)
        self.rows.append(
            {
                "parent": parent,
                "token": link.token,
                "logprob": _rounded(link.token_logprob),
                "text": text,  # what becomes certain with this token
                "rest": window.rest(self._tokenizer),  # what follows it where no token does
            }
        )
        return len(self.rows) - 1


def _iteration(iteration: TraceIteration, hypotheses: _HypothesisTable) -> dict[str, Any]:
    return {
        "roots": iteration.roots,
        "drafted": iteration.drafted,
        "committed": iteration.committed,
        "beams": [
            {"node": beam.node, "hypothesis": hypotheses.index(beam.hypothesis)}
            for beam in iteration.beams
        ],
        "rows": {"draft": iteration.draft_rows, "target": iteration.target_rows},
        "seconds": {
            "draft": _rounded(iteration.draft_s),
            "target": _rounded(iteration.target_s),
            "host": _rounded(iteration.host_s),
        },
        "nodes": [_node(node) for node in iteration.nodes],
    }


def _node(node: TraceNode) -> dict[str, Any]:
    """Return a node. JSON knows no -inf: probability 0 comes with a ``log_weight`` of null."""
    fields = dataclasses.asdict(node)
    p, q = fields.pop("target_log_prob"), fields.pop("draft_log_prob")
    weight = fields.pop("log_weight")
    return fields | {
        "p": None if p is None else _rounded(math.exp(p)),
        "q": None if q is None else _rounded(math.exp(q)),
        "log_weight": None if weight is None or math.isinf(weight) else _rounded(weight),
    }


def _rounded(number: float) -> float:
    return float(f"{number:.7g}")
