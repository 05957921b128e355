"""The tiny bundle, opened."""

from collections.abc import Iterator

import pytest

from dsbd_ort import Pipeline
from dsbd_runtime.bundle_files.bundle import Bundle


@pytest.fixture
def pipeline(tiny_bundle: Bundle) -> Iterator[Pipeline]:
    with Pipeline.from_bundle(tiny_bundle.path, num_threads=1) as opened:
        yield opened
