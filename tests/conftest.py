"""Fixtures of several folders: pairs of models, exported once, and a tiny bundle.

What imports torch is imported inside of functions: the process that only hands out the tests would
wait for it for seconds, and so would one that runs a file without models.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dsbd_ort import Pipeline
from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle
from tests.made_once import made_once
from tests.runtime.feature_pair import DRAFT, TARGET
from tests.runtime.tiny_graph import write_tiny_bundle
from tests.runtime.tokenizer_kinds import KINDS, CountingTokenizer, saved

if TYPE_CHECKING:
    from scripts.shared_captures import SharedCaptures

if "PYTEST_XDIST_WORKER" in os.environ:
    import torch

    # As many tests run side by side as there are cores: more threads would wait for each other,
    # busily. The variable is for the processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Leave what was imported, a million objects, out of every later search for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def captures(tmp_path_factory: pytest.TempPathFactory) -> SharedCaptures:
    """Source of exports in which something else than the capture is tested."""
    from scripts.shared_captures import SharedCaptures

    def make(folder: Path) -> Path:
        folder.mkdir()
        return folder

    return SharedCaptures(made_once(tmp_path_factory, "captures", make))


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory, captures: SharedCaptures) -> Path:
    """The bundle that ``dsbd-export --demo`` makes."""
    from tests.exports import export_demo_pair

    return made_once(tmp_path_factory, "demo", partial(export_demo_pair, captures))


@pytest.fixture(scope="session")
def int8_bundle(tmp_path_factory: pytest.TempPathFactory, captures: SharedCaptures) -> Path:
    """The demo pair in int8-dynamic, whose engines are bit-exact."""
    from tests.exports import export_demo_pair

    make = partial(export_demo_pair, captures, quantize="int8-dynamic")
    return made_once(tmp_path_factory, "int8", make)


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Random models of two layers and a tokenizer of one token a byte."""
    path = tmp_path_factory.mktemp("bundles") / "tiny"
    return open_bundle(write_tiny_bundle(path))


@pytest.fixture(scope="module")
def tiny_pipe(tiny_bundle: Bundle) -> Iterator[Pipeline]:
    with Pipeline.from_bundle(tiny_bundle.path, num_threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def demo_pipe(demo_bundle: Path) -> Iterator[Pipeline]:
    with Pipeline.from_bundle(demo_bundle, num_threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def source_pipe(source_pair: Path) -> Iterator[Pipeline]:
    with Pipeline.from_bundle(source_pair / "bundle", num_threads=1) as opened:
        yield opened


@pytest.fixture(scope="module", params=KINDS)
def tokenizer_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def any_tokenizer(
    tokenizer_kind: str, tmp_path_factory: pytest.TempPathFactory
) -> CountingTokenizer:
    return saved(KINDS[tokenizer_kind](), tmp_path_factory.mktemp(tokenizer_kind))


@pytest.fixture(scope="session")
def llama_2(tmp_path_factory: pytest.TempPathFactory) -> CountingTokenizer:
    return saved(KINDS["llama_2"](), tmp_path_factory.mktemp("llama_2"))


@pytest.fixture(scope="session")
def feature_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A tiny target with features, and a feature draft."""
    path = tmp_path_factory.mktemp("features") / "bundle"
    return open_bundle(write_tiny_bundle(path, target=TARGET, draft=DRAFT), verify=True)


@pytest.fixture(scope="session")
def source_pair(tmp_path_factory: pytest.TempPathFactory, captures: SharedCaptures) -> Path:
    """Marian drafted by T5, which has the same tokens: the bundle and both checkpoints."""
    from tests.encoder_decoder_pair import exported

    make = partial(exported, "marian", "t5", captures)
    return made_once(tmp_path_factory, "encoder-decoders", make)


@pytest.fixture(scope="session")
def whisper(captures: SharedCaptures, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints "target" and "english" of tiny Whispers, and their bundles.

    "bundle" has a draft, "english-bundle" none.
    """
    from tests.exports import export_whispers

    return made_once(tmp_path_factory, "whisper", partial(export_whispers, captures))
