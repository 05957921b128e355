"""What several folders of tests share: the demo pair, exported once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsbd_export.config import ExportConfig
from dsbd_export.demo import demo_pair
from dsbd_export.pipeline import export_bundle


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle that ``dsbd-export --demo`` makes."""
    target, draft = demo_pair()
    output = tmp_path_factory.mktemp("demo") / "bundle"
    export_bundle(
        ExportConfig(target=str(target), draft=str(draft), output=output), report=lambda _: None
    )
    return output
