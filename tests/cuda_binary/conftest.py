"""The process with the CUDA provider, one for a module, and the bundles that are opened in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsbd_export.config import ExportConfig
from dsbd_export.demo import demo_pair
from dsbd_export.pipeline import export_bundle
from tests.cuda_binary.stand_in import Unavailable
from tests.cuda_binary.worker import Worker


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    try:
        process = Worker()
    except Unavailable as reason:
        pytest.skip(str(reason))
    yield process
    process.close()


@pytest.fixture(scope="session")
def fp16_bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo pair as a GPU runs it: fp16, with a head of 64 candidates."""
    target, draft = demo_pair()
    output = tmp_path_factory.mktemp("fp16") / "bundle"
    config = ExportConfig(
        target=str(target), draft=str(draft), output=Path(output), dtype="fp16", logits="topk:64"
    )
    export_bundle(config, report=lambda _: None)
    return str(output)
