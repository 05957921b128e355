"""Writing a bundle: whole or absent, and never over something else."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from dsbd_runtime.bundle_files.bundle import ROLES, open_bundle, sha256_of, write_manifest
from dsbd_runtime.bundle_files.staging import new_bundle
from dsbd_runtime.errors import BundleError
from tests.runtime.tiny_graph import TinyModel

ENTRY = TinyModel().entry()


def write_small_bundle(path: Path, content: str = "x") -> None:
    with new_bundle(path) as folder:
        for role in ROLES:
            (folder / role).mkdir()
            for name in ("model.onnx", "prune.onnx"):
                (folder / role / name).write_text(content)
        (folder / "tokenizer.json").write_text("{}")
        write_manifest(folder, versions={"dsbd-ort": "0"}, target=ENTRY, draft=ENTRY)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_written_bundle_opens(tmp_path: Path) -> None:
    write_small_bundle(tmp_path / "deep" / "down" / "bundle")
    bundle = open_bundle(tmp_path / "deep" / "down" / "bundle", verify=True)
    assert bundle.manifest.versions == {"dsbd-ort": "0"}
    assert bundle.manifest.files["tokenizer.json"].size == 2
    assert names_in(tmp_path / "deep" / "down") == ["bundle"]
    mode = stat.S_IMODE(os.stat(bundle.path).st_mode)
    assert mode == 0o755


def test_it_is_synced_before_it_has_its_name(tmp_path: Path, synced: list[Path]) -> None:
    write_small_bundle(tmp_path / "bundle")
    names = {path.name for path in (tmp_path / "bundle").rglob("*")}
    (partial,) = {path for path in synced if ".bundle.partial-" in path.name}
    assert {path.name for path in synced if path.is_relative_to(partial)} == names | {partial.name}
    assert synced[-1] == tmp_path


def test_hashes_are_sha256(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256_of(tmp_path / "file").startswith("ba7816bf8f01cfea414140de5dae2223")


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="export"), new_bundle(tmp_path / "bundle") as folder:
        (folder / "half").write_text("x")
        raise RuntimeError("export")
    assert names_in(tmp_path) == []


def test_an_interrupt_leaves_the_old_bundle(tmp_path: Path) -> None:
    write_small_bundle(tmp_path / "bundle", "old")
    with pytest.raises(KeyboardInterrupt), new_bundle(tmp_path / "bundle") as folder:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt
    assert names_in(tmp_path) == ["bundle"]
    open_bundle(tmp_path / "bundle", verify=True)


def test_a_bundle_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write_small_bundle(tmp_path / "bundle", "old")
    (tmp_path / "bundle" / "leftover").write_text("x")
    write_small_bundle(tmp_path / "bundle", "new")
    assert names_in(tmp_path) == ["bundle"]
    assert not (tmp_path / "bundle" / "leftover").exists()
    assert (tmp_path / "bundle" / "target" / "model.onnx").read_text() == "new"
    open_bundle(tmp_path / "bundle", verify=True)


def test_a_link_to_a_bundle_stays_a_link(tmp_path: Path) -> None:
    write_small_bundle(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_small_bundle(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "target" / "model.onnx").read_text() == "new"
    assert names_in(tmp_path) == ["link", "real"]


def test_an_empty_folder_may_become_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    write_small_bundle(tmp_path / "bundle")
    open_bundle(tmp_path / "bundle")


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_is_no_bundle_is_not_replaced(tmp_path: Path, is_folder: bool) -> None:
    foreign = tmp_path / "precious"
    if is_folder:
        foreign.mkdir()
        (foreign / "thesis.txt").write_text("x")
    else:
        foreign.write_text("x")
    with pytest.raises(BundleError, match="exists and is not a bundle"):
        write_small_bundle(foreign)
    assert names_in(tmp_path) == ["precious"]


def test_a_parent_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match="cannot write next to"):
        write_small_bundle(tmp_path / "file" / "bundle")


def test_the_writer_refuses_what_the_reader_would(tmp_path: Path) -> None:
    odd = replace(ENTRY, dtype="float32")
    with pytest.raises(BundleError, match="draft: dtype is 'float32'"):
        write_manifest(tmp_path, versions={}, target=ENTRY, draft=odd)
    assert names_in(tmp_path) == []
