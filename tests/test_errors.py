"""One exception tree: every error of every package is a DsbdError."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import dsbd_ort
from dsbd_errors import DsbdError

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "dsbd_ort": "dsbd_ort",
    "dsbd_runtime": "runtime/dsbd_runtime",
    "dsbd_export": "export/dsbd_export",
}


def error_classes() -> list[type]:
    """Return every class of the packages whose name says that it is an error."""
    found = []
    for package, folder in PACKAGES.items():
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
                    module = importlib.import_module(".".join((package, *parts)))
                    found.append(getattr(module, node.name))
    return found


def test_every_error_is_a_dsbd_error():
    classes = error_classes()
    names = {error.__name__ for error in classes}
    assert {"BundleError", "ConfigError", "ExportError", "BenchmarkError", "BatchError"} <= names
    assert [error for error in classes if not issubclass(error, DsbdError)] == []
    assert dsbd_ort.DsbdError is DsbdError


def test_the_root_of_the_errors_imports_nothing_of_ours():
    code = "import sys, dsbd_errors; print(*(n for n in sys.modules if n.startswith('dsbd_')))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["dsbd_errors"]
