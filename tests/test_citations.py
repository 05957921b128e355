"""Every section that the code cites stands in the document that it names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CITED = re.compile(r"(docs/[a-z_/]+\.md)(?: ((?:\d+(?:\.\d+)*(?:, )?)+))?")


def sources() -> list[Path]:
    folders = ("dsbd_ort", "export", "runtime", "scripts", "lab", "tests", "examples")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*")]
    kinds = (".py", ".hpp", ".cpp", ".h", ".js", "")
    return [f for f in files if f.is_file() and f.suffix in kinds]


def test_cited_documents_and_sections_exist() -> None:
    num_cited = 0
    for file in sources():
        for document, numbers in CITED.findall(file.read_text(encoding="utf-8", errors="ignore")):
            path = ROOT / document
            assert path.is_file(), f"{file.relative_to(ROOT)} cites {document}"
            headings = re.findall(r"^#+ (\d+(?:\.\d+)*)\.? ", path.read_text(), re.MULTILINE)
            for number in filter(None, numbers.split(", ")):
                assert number in headings, f"{file.relative_to(ROOT)} cites {document} {number}"
                num_cited += 1
    assert num_cited >= 10
