"""What several folders of tests share: the demo pair, exported once, and a tiny bundle."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from dsbd_export.config import ExportConfig
from dsbd_export.demo import demo_pair
from dsbd_export.pipeline import export_bundle
from dsbd_runtime.bundle import Bundle, open_bundle
from tests.made_once import made_once
from tests.runtime.tiny_graph import write_tiny_bundle

if "PYTEST_XDIST_WORKER" in os.environ:
    # As many tests run side by side as there are cores: more threads would wait for each other,
    # busily. The variable is for the processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle that ``dsbd-export --demo`` makes."""
    return made_once(tmp_path_factory, "demo", export_demo_pair)


@pytest.fixture(scope="session")
def int8_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair in int8-dynamic, whose engines are bit-exact."""
    make = partial(export_demo_pair, quantize="int8-dynamic")
    return made_once(tmp_path_factory, "int8", make)


def export_demo_pair(output: Path, quantize: str = "none") -> Path:
    target, draft = demo_pair()
    config = ExportConfig(target=str(target), draft=str(draft), output=output, quantize=quantize)
    export_bundle(config, report=lambda _: None)
    return output


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Random models of two layers and a tokenizer of one token a byte."""
    path = tmp_path_factory.mktemp("bundles") / "tiny"
    write_tiny_bundle(path)
    return open_bundle(path)
