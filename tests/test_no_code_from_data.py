"""Nothing that is shipped reads a format that can hold code, or loads a library of operators."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("runtime/dsbd_errors", "dsbd_ort", "runtime/dsbd_runtime", "export/dsbd_export")
FORBIDDEN = re.compile(
    r"\b(pickle|cloudpickle|dill|joblib|marshal|shelve)\b|allow_pickle(?!=False)"
    r"|torch\.load\b(?!.*weights_only=True)"  # which runs nothing that a file names
    r"|np\.load\b(?!.*allow_pickle=False)"
    r"|register_custom_ops|(?<![\w.])(eval|exec)\("
)


def test_no_pickle_no_evaluated_text_and_no_custom_operators():
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 100
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if FORBIDDEN.search(line)
    ]
    assert found == []
