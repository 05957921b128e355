"""Write a trace: a page for people (.html) or JSON for programs (.json)."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Any

from dsbd_ort.decoding import RequestTrace
from dsbd_ort.json_output import json_text
from dsbd_ort.trace_page.trace_json import trace_object
from dsbd_runtime.errors import InputError
from dsbd_runtime.tokenizer import Tokenizer

_SCRIPTS = ("trace_data.js", "forest_layout.js", "forest_view.js", "panels.js", "page.js")


def write_trace(path: str | os.PathLike[str], trace: RequestTrace, tokenizer: Tokenizer) -> None:
    """Write ``trace`` to a file whose name ends in .html or .json.

    Raises:
        InputError: another ending, or a place that cannot be written.
    """
    file = Path(path)
    check_trace_path(file)
    fields = trace_object(trace, tokenizer)
    text = json_text(fields, ensure_ascii=True) if file.suffix == ".json" else page_html(fields)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"the trace cannot be written to {file}: {error.strerror}") from error


def check_trace_path(file: Path) -> None:
    """Refuse a name or a folder to which no trace can be written, before anything is computed.

    Raises:
        InputError: naming the mend.
    """
    if file.suffix not in (".html", ".json"):
        raise InputError(
            f"a trace cannot be written to {file}: expected a name that ends in .html (a page) "
            "or .json"
        )
    if not file.parent.is_dir():
        raise InputError(
            f"a trace cannot be written to {file}: {file.parent} is no folder; make it first"
        )


def page_html(fields: dict[str, Any]) -> str:
    """Return one page that needs nothing but itself.

    All but ASCII, and every "<", is escaped in the embedded JSON: no text in it ends its element,
    and the line ends U+2028 and U+2029 do no harm.
    """
    data = json_text(fields, ensure_ascii=True).replace("<", "\\u003c")
    page = _part("page.html")
    page = page.replace("/* style */", _part("page.css"))
    page = page.replace("/* script */", "\n".join(map(_part, _SCRIPTS)))
    return page.replace("/* trace */", data)


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
