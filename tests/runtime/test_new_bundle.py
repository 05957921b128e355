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
from dsbd_runtime.bundle_files.bundle import ROLES, open_bundle, write_manifest
from dsbd_runtime.bundle_files.durable_files import checksum, put_in_place
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


def write(output, content):
    with new_bundle(output) as folder:
        fill(folder, content)


def fill(folder, content):
    (folder / MANIFEST_NAME).write_text(content)


def written(output):
    return (output / MANIFEST_NAME).read_text()


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_written_bundle_opens_and_is_replaced_as_a_whole(tmp_path):
    place = tmp_path / "deep" / "down" / "bundle"
    write_small_bundle(place)
    bundle = open_bundle(place, verify=True)
    assert bundle.manifest.versions == {"dsbd-ort": "0"}
    assert bundle.manifest.files["tokenizer.json"].size == 2
    assert bundle.manifest.files["target/model.onnx"].sha256.startswith("2d711642b726b044")  # of x
    assert stat.S_IMODE(os.stat(place).st_mode) == 0o755
    (place / "leftover").write_text("x")
    write_small_bundle(place, "new")
    assert names_in(place.parent) == ["bundle"] and not (place / "leftover").exists()
    assert (place / "target" / "model.onnx").read_text() == "new"
    open_bundle(place, verify=True)


def test_a_link_to_a_bundle_stays_a_link_and_an_empty_folder_becomes_a_bundle(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for content in ("old", "new"):
        write(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink() and written(tmp_path / "real") == content
    assert names_in(tmp_path) == ["link", "real"]


def test_it_is_synced_before_it_has_its_name(tmp_path, synced):
    write_small_bundle(tmp_path / "bundle")
    names = {path.name for path in (tmp_path / "bundle").rglob("*")}
    (partial,) = {path for path in synced if ".bundle.partial-" in path.name}
    assert {path.name for path in synced if path.is_relative_to(partial)} == names | {partial.name}
    assert synced[-1] == tmp_path


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
        assert (written(output), written(first)) == ("second", "first")
    assert written(output) == "first"
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
    assert written(output) == "slow"
    assert names_in(tmp_path) == ["bundle"]


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("is_there_before", [True, False])
@pytest.mark.parametrize("swap", [swap_folders, no_swap])
def test_what_is_no_bundle_is_not_replaced(tmp_path, is_folder, is_there_before, swap):
    output = tmp_path / "precious"

    def come():
        if is_folder:
            output.mkdir()
        (output / "thesis.txt" if is_folder else output).write_text("x")

    if is_there_before:
        come()
    with pytest.raises(BundleError, match="exists and is not a bundle"):
        with new_bundle(output, swap=swap) as folder:
            fill(folder, "new")
            come()
    assert names_in(tmp_path) == ["precious"]
    assert (output / "thesis.txt" if is_folder else output).read_text() == "x"


def test_remains_of_other_outputs_are_left_alone(tmp_path):
    (tmp_path / ".other.partial-12345678").mkdir()
    (tmp_path / ".bundle.partial-12345678").mkdir()
    write(tmp_path / "bundle", "new")
    assert names_in(tmp_path) == [".other.partial-12345678", "bundle"]


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


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_is_put_in_place_is_synced_before(tmp_path, synced, is_folder):
    partial, place = tmp_path / "partial", tmp_path / "place"
    if is_folder:
        (partial / "a" / "b").mkdir(parents=True)
        for name in ("x", "a/y", "a/b/z"):
            (partial / name).write_text("new")
    else:
        partial.write_text("new")
        place.write_text("old")
    inside = [partial, *partial.rglob("*")]
    put_in_place(partial, place)
    assert sorted(synced[:-1]) == sorted(inside) and synced[-1] == tmp_path
    assert (place / "x" if is_folder else place).read_text() == "new" and not partial.exists()
