"""Hook of mkdocs: pages outside docs/, links between pages, the API reference.

README.md is the front page, both on GitHub and on the site. Links to code become plain text,
because the site does not contain the code.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import dsbd_ort

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "lab" / "results").glob("*.md"))
PAGES = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "lab/index.md": "lab/README.md",
    **{f"lab/results/{page.name}": f"lab/results/{page.name}" for page in RESULTS},
}
"""Page of the site: file of the repository."""

_LINK = re.compile(r"(!?\[[^\]]*\])\(((?!https?:|#|mailto:)[^)#\s]*)(#[^)\s]*)?\)")
_ALSO = (
    "dsbd_ort.pipeline_options.PipelineOptions",
    "dsbd_runtime.engine.settings.EngineSettings",
    "dsbd_ort.decoding.DecodingStats",
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/."""
    for page, source in PAGES.items():
        text = site_text((ROOT / source).read_text(encoding="utf-8"), Path(source))
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "api.md", content=api_reference()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page of docs/ with links converted for the site."""
    source = page.file.src_uri
    if source in PAGES or source == "api.md":
        return markdown
    return site_text(markdown, Path("docs") / source)


def site_text(text: str, source: Path) -> str:
    """Return the text of a file of the repository with links converted for the site."""
    page_by_source = {Path(file): page for page, file in PAGES.items()}
    folder = Path(page_by_source.get(source, source.name)).parent

    def as_site_link(match: re.Match[str]) -> str:
        label, target, anchor = match.groups()
        if not target:
            return match[0]
        linked = Path(*_without_parents((source.parent / target).parts))
        if linked in page_by_source:
            page = page_by_source[linked]
        elif linked.parts[0] == "docs":
            page = Path(*linked.parts[1:]).as_posix()
        else:
            return label[1:-1]
        return f"{label}({os.path.relpath(page, folder)}{anchor or ''})"

    return _LINK.sub(as_site_link, text)


def _without_parents(parts: tuple[str, ...]) -> list[str]:
    """Return path parts with every ".." resolved: docs/../examples is examples."""
    resolved: list[str] = []
    for part in parts:
        if part == "..":
            resolved.pop()
        else:
            resolved.append(part)
    return resolved


def api_reference() -> str:
    """Return the page of the public names of ``dsbd_ort``, from their docstrings."""
    names = [name for name in dsbd_ort.__all__ if not name.startswith("__")]
    homes = {**dsbd_ort._HOMES, "DsbdError": None}
    paths = [
        f"dsbd_ort.{homes[name]}.{name}" if homes[name] else f"dsbd_errors.{name}" for name in names
    ]
    return "\n\n".join(["# Python", *(f"::: {path}" for path in [*paths, *_ALSO])]) + "\n"
