"""Checksums of files: the same however a file is read, another for every damage that is tried."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

from dsbd_runtime.bundle_files import durable_files
from dsbd_runtime.bundle_files.durable_files import checksum, put_in_place, sync_folder


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_files, "_CHUNK", 64)
    monkeypatch.setattr(durable_files, "_BLOCK", 48)


@pytest.mark.parametrize("num_bytes", [0, 1, 47, 48, 63, 64, 65, 128, 200])
def test_it_is_that_of_the_checksums_of_chunks(
    small_chunks: None, tmp_path: Path, num_bytes: int
) -> None:
    content = np.random.default_rng(num_bytes).bytes(num_bytes)
    (tmp_path / "file").write_bytes(content)
    chunks = [content[i : i + 64] for i in range(0, num_bytes, 64)]
    of_chunks = b"".join(zlib.crc32(chunk).to_bytes(4, "little") for chunk in chunks)
    assert checksum(tmp_path / "file") == zlib.crc32(of_chunks)


def test_every_bit_and_every_length_counts(small_chunks: None, tmp_path: Path) -> None:
    content = bytes(150)
    damaged = [content[:length] for length in range(150)]
    damaged += [bytes(n) + bytes([1 << n % 8]) + bytes(149 - n) for n in range(150)]
    found = set()
    for number, other in enumerate([content, *damaged]):
        (tmp_path / str(number)).write_bytes(other)
        found.add(checksum(tmp_path / str(number)))
    assert len(found) == 1 + len(damaged)


def test_all_that_is_in_a_folder_is_synced(tmp_path: Path, synced: list[Path]) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("x", "a/y", "a/b/z"):
        (tmp_path / name).write_text(name)
    sync_folder(tmp_path)
    assert sorted(synced) == sorted([tmp_path, *tmp_path.rglob("*")])


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_is_put_in_place_is_synced_before(
    tmp_path: Path, synced: list[Path], is_folder: bool
) -> None:
    partial, place = tmp_path / "partial", tmp_path / "place"
    if is_folder:
        partial.mkdir()
        (partial / "x").write_text("new")
    else:
        partial.write_text("new")
        place.write_text("old")
    put_in_place(partial, place)
    assert synced == [*([partial / "x"] if is_folder else []), partial, tmp_path]
    assert (place / "x" if is_folder else place).read_text() == "new" and not partial.exists()
