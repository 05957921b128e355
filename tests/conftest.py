"""What several folders of tests share: the demo pair, exported once, and a tiny bundle."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsbd_export.config import ExportConfig
from dsbd_export.demo import demo_pair
from dsbd_export.pipeline import export_bundle
from dsbd_runtime.bundle import Bundle, open_bundle
from tests.runtime.tiny_graph import write_tiny_bundle


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle that ``dsbd-export --demo`` makes."""
    target, draft = demo_pair()
    output = tmp_path_factory.mktemp("demo") / "bundle"
    export_bundle(
        ExportConfig(target=str(target), draft=str(draft), output=output), report=lambda _: None
    )
    return output


@pytest.fixture(scope="session")
def int8_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair in int8-dynamic, whose engines are bit-exact."""
    target, draft = demo_pair()
    output = tmp_path_factory.mktemp("int8") / "bundle"
    config = ExportConfig(
        target=str(target), draft=str(draft), output=output, quantize="int8-dynamic"
    )
    export_bundle(config, report=lambda _: None)
    return output


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Random models of two layers and a tokenizer of one token a byte."""
    path = tmp_path_factory.mktemp("bundles") / "tiny"
    write_tiny_bundle(path)
    return open_bundle(path)
