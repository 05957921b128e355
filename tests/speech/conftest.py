"""The tiny random Whisper, opened."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsbd_ort import Pipeline


@pytest.fixture(scope="session")
def speech_bundle(whisper: Path) -> Path:
    return whisper / "bundle"


@pytest.fixture(scope="session")
def speech_pipe(whisper: Path) -> Iterator[Pipeline]:
    with Pipeline.from_bundle(whisper / "bundle", num_threads=1) as pipe:
        yield pipe
