"""Writing bundles: whole or absent, killed or not, in any number at a time; their checksums."""

import os
import stat
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsbd_runtime.bundle_files import durable_files
from dsbd_runtime.bundle_files.bundle import ROLES, open_bundle, sha256_of, write_manifest
from dsbd_runtime.bundle_files.durable_files import checksum, put_in_place, sync_folder
from dsbd_runtime.bundle_files.manifest import MANIFEST_NAME
from dsbd_runtime.bundle_files.staging import new_bundle, swap_folders
from dsbd_runtime.errors import BundleError
from tests.runtime.tiny_graph import TinyModel

ENTRY = TinyModel().entry()


def write_small_bundle(path, content="x"):
    with new_bundle(path) as folder:
        for role in ROLES:
            (folder / role).mkdir()
            for name in ("model.onnx", "prune.onnx"):
                (folder / role / name).write_text(content)
        (folder / "tokenizer.json").write_text("{}")
        write_manifest(folder, versions={"dsbd-ort": "0"}, target=ENTRY, draft=ENTRY)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_written_bundle_opens(tmp_path):
    write_small_bundle(tmp_path / "deep" / "down" / "bundle")
    bundle = open_bundle(tmp_path / "deep" / "down" / "bundle", verify=True)
    assert bundle.manifest.versions == {"dsbd-ort": "0"}
    assert bundle.manifest.files["tokenizer.json"].size == 2
    assert names_in(tmp_path / "deep" / "down") == ["bundle"]
    mode = stat.S_IMODE(os.stat(bundle.path).st_mode)
    assert mode == 0o755


def test_it_is_synced_before_it_has_its_name(tmp_path, synced):
    write_small_bundle(tmp_path / "bundle")
    names = {path.name for path in (tmp_path / "bundle").rglob("*")}
    (partial,) = {path for path in synced if ".bundle.partial-" in path.name}
    assert {path.name for path in synced if path.is_relative_to(partial)} == names | {partial.name}
    assert synced[-1] == tmp_path


def test_hashes_are_sha256(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256_of(tmp_path / "file").startswith("ba7816bf8f01cfea414140de5dae2223")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_nothing_or_the_old_bundle(tmp_path, error):
    for left in ([], ["bundle"]):
        if left:
            write_small_bundle(tmp_path / "bundle", "old")
        with pytest.raises(error, match="export"), new_bundle(tmp_path / "bundle") as folder:
            (folder / "half").write_text("x")
            raise error("export")
        assert names_in(tmp_path) == left
    open_bundle(tmp_path / "bundle", verify=True)


def test_a_bundle_is_replaced_as_a_whole(tmp_path):
    write_small_bundle(tmp_path / "bundle", "old")
    (tmp_path / "bundle" / "leftover").write_text("x")
    write_small_bundle(tmp_path / "bundle", "new")
    assert names_in(tmp_path) == ["bundle"]
    assert not (tmp_path / "bundle" / "leftover").exists()
    assert (tmp_path / "bundle" / "target" / "model.onnx").read_text() == "new"
    open_bundle(tmp_path / "bundle", verify=True)


def test_a_link_to_a_bundle_stays_a_link(tmp_path):
    write_small_bundle(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_small_bundle(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "target" / "model.onnx").read_text() == "new"
    assert names_in(tmp_path) == ["link", "real"]


def test_an_empty_folder_may_become_a_bundle(tmp_path):
    (tmp_path / "bundle").mkdir()
    write_small_bundle(tmp_path / "bundle")
    open_bundle(tmp_path / "bundle")


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_is_no_bundle_is_not_replaced(tmp_path, is_folder):
    foreign = tmp_path / "precious"
    if is_folder:
        foreign.mkdir()
        (foreign / "thesis.txt").write_text("x")
    else:
        foreign.write_text("x")
    with pytest.raises(BundleError, match="exists and is not a bundle"):
        write_small_bundle(foreign)
    assert names_in(tmp_path) == ["precious"]


def test_a_parent_that_takes_nothing_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    for parent in (str(tmp_path / "file"), "/sys/kernel"):
        with pytest.raises(BundleError, match=f"cannot write next to {parent}"):
            write(Path(parent, "bundle"), "new")


def test_the_writer_refuses_what_the_reader_would(tmp_path):
    odd = replace(ENTRY, dtype="float32")
    with pytest.raises(BundleError, match="draft: dtype is 'float32'"):
        write_manifest(tmp_path, versions={}, target=ENTRY, draft=odd)
    assert names_in(tmp_path) == []


CRASHES = Path(__file__).with_name("crashes.py")


def no_swap(_first, _second):
    """A file system that cannot swap."""
    return False


def write(output, content):
    with new_bundle(output) as folder:
        fill(folder, content)


def fill(folder, content):
    (folder / MANIFEST_NAME).write_text(content)


@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize("can_swap", [True, False])
def test_killed_at_any_moment(tmp_path, has_old, can_swap):
    """Afterwards the old bundle, the new one or none stands there; the next export works."""
    done = subprocess.run(
        [sys.executable, str(CRASHES), str(tmp_path), str(has_old), str(can_swap)],
        env={"PYTHONPATH": str(CRASHES.parents[2] / "runtime")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 10  # how often it was killed


@pytest.mark.parametrize("swap", [swap_folders, no_swap])
def test_the_last_export_to_finish_stays(tmp_path, swap):
    output = tmp_path / "bundle"
    with new_bundle(output, swap=swap) as first:
        fill(first, "first")
        with new_bundle(output, swap=swap) as second:
            fill(second, "second")
            assert first.is_dir() and second.is_dir() and not output.exists()
        assert (output / MANIFEST_NAME).read_text() == "second"
        assert (first / MANIFEST_NAME).read_text() == "first"
    assert (output / MANIFEST_NAME).read_text() == "first"
    assert names_in(tmp_path) == ["bundle"]


def test_a_running_export_of_another_process_is_left_alone(tmp_path):
    output = tmp_path / "bundle"
    code = (
        "import sys\nfrom dsbd_runtime.bundle_files.staging import new_bundle\n"
        f"with new_bundle({str(output)!r}) as folder:\n"
        "    print('open', flush=True); sys.stdin.read()\n"
        f"    (folder / {MANIFEST_NAME!r}).write_text('slow')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(CRASHES.parents[2] / "runtime")},
    ) as slow:
        assert slow.stdout is not None and slow.stdout.readline() == b"open\n"
        write(output, "fast")
        assert len(names_in(tmp_path)) == 3  # the bundle, what is being written, and its lock
        slow.communicate()
    assert slow.returncode == 0
    assert (output / MANIFEST_NAME).read_text() == "slow"
    assert names_in(tmp_path) == ["bundle"]


@pytest.mark.parametrize("swap", [swap_folders, no_swap])
def test_what_came_into_the_way_is_not_replaced(tmp_path, swap):
    output = tmp_path / "bundle"
    with pytest.raises(BundleError, match="exists and is not a bundle"):
        with new_bundle(output, swap=swap) as folder:
            fill(folder, "new")
            output.mkdir()
            (output / "thesis.txt").write_text("x")
    assert names_in(tmp_path) == ["bundle"] and names_in(output) == ["thesis.txt"]


def test_remains_of_other_outputs_are_left_alone(tmp_path):
    (tmp_path / ".other.partial-12345678").mkdir()
    (tmp_path / ".bundle.partial-12345678").mkdir()
    write(tmp_path / "bundle", "new")
    assert names_in(tmp_path) == [".other.partial-12345678", "bundle"]


def test_folders_are_swapped_whole(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    assert swap_folders(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "content").read_text() == "b"
    assert (tmp_path / "b" / "content").read_text() == "a"
    assert not swap_folders(tmp_path / "a", tmp_path / "absent")


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(durable_files, "_CHUNK", 64)
    monkeypatch.setattr(durable_files, "_BLOCK", 48)


@pytest.mark.parametrize("num_bytes", [0, 1, 47, 48, 63, 64, 65, 128, 200])
def test_it_is_that_of_the_checksums_of_chunks(small_chunks, tmp_path, num_bytes):
    content = np.random.default_rng(num_bytes).bytes(num_bytes)
    (tmp_path / "file").write_bytes(content)
    chunks = [content[i : i + 64] for i in range(0, num_bytes, 64)]
    of_chunks = b"".join(zlib.crc32(chunk).to_bytes(4, "little") for chunk in chunks)
    assert checksum(tmp_path / "file") == zlib.crc32(of_chunks)


def test_every_bit_and_every_length_counts(small_chunks, tmp_path):
    content = bytes(150)
    damaged = [content[:length] for length in range(150)]
    damaged += [bytes(n) + bytes([1 << n % 8]) + bytes(149 - n) for n in range(150)]
    found = set()
    for number, other in enumerate([content, *damaged]):
        (tmp_path / str(number)).write_bytes(other)
        found.add(checksum(tmp_path / str(number)))
    assert len(found) == 1 + len(damaged)


def test_all_that_is_in_a_folder_is_synced(tmp_path, synced):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("x", "a/y", "a/b/z"):
        (tmp_path / name).write_text(name)
    sync_folder(tmp_path)
    assert sorted(synced) == sorted([tmp_path, *tmp_path.rglob("*")])


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_is_put_in_place_is_synced_before(tmp_path, synced, is_folder):
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
