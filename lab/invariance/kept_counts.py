"""Counts of a long measurement in a file: the next call goes on where the last one ended."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import onnxruntime as ort

from dsbd_ort.benchmark.report import precision_name
from dsbd_runtime.bundle_files.bundle import MANIFEST_NAME, Bundle
from lab.frame.page import BUILD


class KeptCounts:
    """Counts by key, each of which is replaced whole."""

    def __init__(self, file: Path) -> None:
        """Read those of earlier calls."""
        self._file = file
        self._counts: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def get(self, key: str) -> Any:
        """Return what was kept last, None where nothing was."""
        return self._counts.get(key)

    def put(self, key: str, counts: Any) -> None:
        """Keep counts, made of what JSON has."""
        self._counts[key] = counts
        self._file.parent.mkdir(parents=True, exist_ok=True)
        whole = self._file.with_suffix(".part")
        whole.write_text(json.dumps(self._counts, indent=1))
        whole.replace(self._file)


def bundle_key(bundle: Bundle, *settings: object) -> str:
    """Return what tells apart bundle, kernels and settings; a manifest has all files' digests."""
    digest = hashlib.sha256((bundle.path / MANIFEST_NAME).read_bytes()).hexdigest()[:16]
    parts = f"{bundle.path.name} {digest}", f"onnxruntime {ort.__version__}", *map(str, settings)
    return ", ".join(parts)


def counted_name(bundle: Bundle) -> str:
    """Return the first cell of a bundle's rows: its folder, precision, and what it claims."""
    entry = bundle.entry("target")
    claim = f"bit-exact: {entry.bit_exact or 'no'}"
    return f"`{bundle.path.name}`, {precision_name(entry)}, {claim}"


def kept_options(minutes: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options --minutes and --record."""
    of_bundle = click.option(
        "--minutes", default=minutes, show_default=True, help="Of every bundle, in this call."
    )
    record = click.option(
        "--record",
        type=click.Path(path_type=Path),
        default=BUILD / "invariance.json",
        help="Counts so far [build/invariance.json].",
    )
    return lambda function: of_bundle(record(function))
