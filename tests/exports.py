"""The demo pair in the forms that tests read, its graphs captured once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsbd_export.config import ExportConfig
from dsbd_export.demo import demo_pair
from dsbd_export.pipeline import export_bundle
from scripts.shared_captures import SharedCaptures


def export_demo_pair(captures: SharedCaptures, output: Path, **options: Any) -> Path:
    target, draft = demo_pair()
    config = ExportConfig(target=str(target), draft=str(draft), output=output, **options)
    export_bundle(config, report=lambda _: None, source_of=captures)
    return output
