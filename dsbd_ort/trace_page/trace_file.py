"""Trace of a request as a file: a page for people (.html), or JSON (.json, docs/run.md)."""

import dataclasses
import math
import os
from importlib import resources
from pathlib import Path
from typing import Any

from dsbd_ort.decoding import DecodingConfig, RequestTrace, TraceIteration, TraceNode
from dsbd_ort.decoding.beams import Hypothesis
from dsbd_ort.output_files import write_whole
from dsbd_ort.requests.results import json_text
from dsbd_ort.version import __version__
from dsbd_runtime.errors import InputError
from dsbd_runtime.text.stream_decoder import TextWindow, whole_text
from dsbd_runtime.text.tokenizer import Tokenizer

TRACE_VERSION = 1
"""Raised when a field is removed or changes its meaning, not when a field is added."""

_SCRIPTS = ("trace_data.js", "forest_layout.js", "forest_view.js", "panels.js", "page.js")
_VISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def write_trace(path: str | os.PathLike[str], trace: RequestTrace, tokenizer: Tokenizer) -> None:
    """Write ``trace`` to a file whose name ends in .html or .json.

    InputError: the name has another ending, or the file cannot be written.
    """
    file = Path(path)
    check_trace_path(file)
    fields = trace_object(trace, tokenizer)
    text = json_text(fields, ensure_ascii=True) if file.suffix == ".json" else page_html(fields)
    try:
        write_whole(file, text)
    except OSError as error:
        raise InputError(f"the trace cannot be written to {file}: {error.strerror}") from error


def check_trace_path(file: Path) -> None:
    """Raise InputError for a name or a folder to which no trace can be written."""
    if file.suffix not in (".html", ".json"):
        raise InputError(
            f"a trace cannot be written to {file}: expected a name that ends in .html (a page) "
            "or .json"
        )
    if not file.parent.is_dir():
        raise InputError(
            f"a trace cannot be written to {file}: {file.parent} is not a folder; make it first"
        )


def page_html(fields: dict[str, Any]) -> str:
    """Return a self-contained page.

    Every "<" and all non-ASCII characters are escaped in the embedded JSON. So no text in it can
    close its element or contain the line ends U+2028 and U+2029.
    """
    data = json_text(fields, ensure_ascii=True).replace("<", "\\u003c")
    page = _part("page.html")
    page = page.replace("/* style */", _part("page.css"))
    page = page.replace("/* script */", "\n".join(map(_part, _SCRIPTS)))
    return page.replace("/* trace */", data)


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def trace_object(trace: RequestTrace, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the trace as one JSON object, with all that the page shows."""
    if trace.config is not None and not trace.config.skip_special_tokens:
        tokenizer = tokenizer.with_special_tokens
    hypotheses = _HypothesisTable(TextWindow.after(tokenizer, trace.prompt_ids))
    iterations = [_iteration(iteration, hypotheses) for iteration in trace.iterations]
    nodes = [node for iteration in trace.iterations for node in iteration.nodes]
    in_forest = {node.token for node in nodes}
    in_forest |= {token for node in nodes for token, _ in node.forbidden}
    in_beams = {row["token"] for row in hypotheses.rows[1:]}
    return {
        "version": TRACE_VERSION,
        "program": f"dsbd-ort {__version__}",
        "config": _config(trace.config) if trace.config else None,
        "prompt": {"token_ids": trace.prompt_ids, "text": whole_text(tokenizer, trace.prompt_ids)},
        "labels": {token: token_label(tokenizer, token) for token in sorted(in_forest | in_beams)},
        "hypotheses": hypotheses.rows,
        "iterations": iterations,
    }


def _config(config: DecodingConfig) -> dict[str, Any]:
    plain = dataclasses.replace(config, constraint=None, logits_processors=())
    return dataclasses.asdict(plain) | {
        "constraint": getattr(config.constraint, "name", None),
        "logits_processors": [
            getattr(each, "__qualname__", type(each).__qualname__)
            for each in config.logits_processors
        ],
    }


class _HypothesisTable:
    """All hypotheses of a request, each once, as rows that have the index of their parent's row."""

    def __init__(self, start: TextWindow) -> None:
        self.rows: list[dict[str, Any]] = [{"parent": None, "text": "", "rest": start.rest()}]
        self._windows = [start]
        self._index: dict[Hypothesis, int] = {}

    def index(self, hypothesis: Hypothesis) -> int:
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
        window, text = self._windows[parent].extended((link.token,))
        self._windows.append(window)
        self.rows.append(
            {
                "parent": parent,
                "token": link.token,
                "logprob": _rounded(link.token_logprob),
                "text": text,  # text that becomes final with this token
                "rest": window.rest(),  # text after it if this token is the last
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
    """Return a node; probability 0 has a ``log_weight`` of null, since JSON has no -inf."""
    fields = dataclasses.asdict(node)
    p, q = fields.pop("target_log_prob"), fields.pop("draft_log_prob")
    weight = fields.pop("log_weight")
    fields["forbidden"] = [[token, _rounded(p)] for token, p in node.forbidden]
    return fields | {
        "p": None if p is None else _rounded(math.exp(p)),
        "q": None if q is None else _rounded(math.exp(q)),
        "log_weight": None if weight is None or math.isinf(weight) else _rounded(weight),
    }


def _rounded(number: float) -> float:
    return float(f"{number:.7g}")


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    r"""Return a token as text: ``·def``, ``⏎``, ``<eos>``, ``\xe2\x82`` (part of a character)."""
    return "".join(map(_visible, tokenizer.name_of(token_id)))


def _visible(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    return character if character.isprintable() else ascii(character)[1:-1]
