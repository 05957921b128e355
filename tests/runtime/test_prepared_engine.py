"""Engines kept as ONNX Runtime runs them: the same bits, one copy, damage and lack of room."""

import json
import logging
import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from filelock import lock_descriptor

from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.bundle_files.durable_files import checksum
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.loading import load_causal_lm, load_pair
from dsbd_runtime.ort.ort_session import OrtSession
from dsbd_runtime.ort.prepared_engine import PreparedEngine
from tests.runtime.model_calls import append_chain

PARTS = {"model.onnx", "model.bin", "whole.json"}


def logits_of(bundle, engine_cache=None):
    with load_causal_lm(bundle, "target", settings=settings_of(engine_cache)) as model:
        return np.asarray(append_chain(model, 9, np.arange(9)))


def settings_of(folder):
    return EngineSettings(num_threads=1, engine_cache=None if folder is None else str(folder))


def logits_in_process(bundle, folder):
    return logits_of(open_bundle(bundle), engine_cache=folder).tobytes()


def only(folder):
    """The one prepared engine there is, and nothing else."""
    (place,) = folder.iterdir()
    assert {path.name for path in place.iterdir()} == PARTS
    return place


def written(place):
    return {path.name: path.stat().st_mtime_ns for path in place.iterdir()}


def test_a_prepared_engine_has_the_bits_of_the_bundle(tiny_bundle, tmp_path):
    plain = logits_of(tiny_bundle)
    folder = tmp_path / "not" / "yet"
    np.testing.assert_array_equal(logits_of(tiny_bundle, engine_cache=folder), plain)
    before = written(only(folder))
    np.testing.assert_array_equal(logits_of(tiny_bundle, engine_cache=folder), plain)
    assert written(only(folder)) == before  # the second opening only read
    for _ in range(2):
        target, draft = load_pair(tiny_bundle, settings=settings_of(folder))
        with target, draft:
            assert len(list(folder.iterdir())) == 2


def test_openers_at_the_same_time_leave_one(tiny_bundle, tmp_path):
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(4, mp_context=spawn) as pool:
        found = pool.map(logits_in_process, [tiny_bundle.path] * 4, [tmp_path] * 4)
        assert set(found) == {logits_of(tiny_bundle).tobytes()}
    only(tmp_path)


@pytest.mark.parametrize("part", sorted(PARTS))
def test_one_that_is_not_whole_is_made_again(tiny_bundle, tmp_path, part):
    plain = logits_of(tiny_bundle, engine_cache=tmp_path)
    damaged = only(tmp_path) / part
    damaged.write_bytes(damaged.read_bytes()[:-7])
    np.testing.assert_array_equal(logits_of(tiny_bundle, engine_cache=tmp_path), plain)
    assert (only(tmp_path) / part).stat().st_size > 0


@pytest.fixture(scope="module")
def made(tiny_bundle, tmp_path_factory):
    """A folder with one prepared engine, to be copied."""
    folder = tmp_path_factory.mktemp("made")
    logits_of(tiny_bundle, engine_cache=folder)
    return folder


def assert_made_again(bundle, made, folder, caplog):
    """An opening says that the engine is damaged, gives its logits, and leaves it whole."""
    with caplog.at_level(logging.WARNING):
        found = logits_of(bundle, engine_cache=folder)
    np.testing.assert_array_equal(found, logits_of(bundle))
    place = only(folder)
    (said,) = caplog.messages
    assert said == f"the prepared engine {place} is damaged and is made again"
    for part in PARTS:
        assert (place / part).read_bytes() == (only(made) / part).read_bytes()


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("page", ["zeros", "stale", "one bit"])
@pytest.mark.parametrize("part", ["model.bin", "model.onnx"])
def test_a_lost_page_is_noticed(tiny_bundle, made, tmp_path, caplog, part, page, verify):
    folder = Path(shutil.copytree(made, tmp_path / "engines"))
    with (only(folder) / part).open("r+b") as file:
        content = file.read()
        start = len(content) // 2 // 512 * 512
        lost = bytearray(content[start : start + 512])
        if page == "one bit":
            lost[7] ^= 1
        else:
            lost[:] = bytes(512) if page == "zeros" else content[:512]
        assert lost != content[start : start + 512]
        file.seek(start)
        file.write(lost)
    bundle = open_bundle(tiny_bundle.path, verify=verify)
    assert_made_again(bundle, made, folder, caplog)


RECORDS = [
    b"", b"\0" * 300, b"\xff\xfe", b"[]", b"3", b"null", b"{}", b'{"checksum": {}}',
    b'{"checksum": 3}', b'{"checksum": {"model.onnx": null, "model.bin": null}}', b"[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("record", RECORDS, ids=range(len(RECORDS)))
def test_a_damaged_record_is_noticed(tiny_bundle, made, tmp_path, caplog, record):
    folder = Path(shutil.copytree(made, tmp_path / "engines"))
    (only(folder) / "whole.json").write_bytes(record)
    assert_made_again(tiny_bundle, made, folder, caplog)


def test_what_the_checksum_misses_is_noticed_when_hashes_are_checked(
    tiny_bundle, made, tmp_path, caplog
):
    folder = Path(shutil.copytree(made, tmp_path / "engines"))
    weights = only(folder) / "model.bin"
    before = checksum(weights)
    content = bytearray(weights.read_bytes())
    for place, byte in enumerate(((0xEDB88320 << 1) | 1).to_bytes(5, "little")):
        content[700 + place] ^= byte  # by the polynomial itself, so that the remainder is the same
    weights.write_bytes(content)
    assert checksum(weights) == before
    logits_of(tiny_bundle, engine_cache=folder)
    assert caplog.messages == []
    assert_made_again(open_bundle(tiny_bundle.path, verify=True), made, folder, caplog)


def test_one_that_does_not_open_is_removed_and_said(tiny_bundle, tmp_path, caplog):
    plain = logits_of(tiny_bundle, engine_cache=tmp_path)
    graph = only(tmp_path) / "model.onnx"
    graph.write_bytes(b"x" * graph.stat().st_size)
    record = json.loads((only(tmp_path) / "whole.json").read_text())
    record["checksum"]["model.onnx"] = checksum(graph)
    (only(tmp_path) / "whole.json").write_text(json.dumps(record))
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(logits_of(tiny_bundle, engine_cache=tmp_path), plain)
    assert "a prepared engine cannot be opened and is removed: ONNX Runtime" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_it_is_synced_before_it_has_its_name(tiny_bundle, tmp_path, synced):
    logits_of(tiny_bundle, engine_cache=tmp_path)
    (folder,) = {path.parent for path in synced if path.name in PARTS}
    assert folder.parent.name.startswith(".new-")
    assert {folder / part for part in PARTS} | {folder, tmp_path} == set(synced)
    assert synced[-1] == tmp_path  # the new name, after all that it names


def test_other_files_of_a_bundle_have_another(bundle_copy, tmp_path):
    bundle = open_bundle(bundle_copy)
    files, names = bundle.manifest.files, set()
    for name in {"target/model.onnx", "target/model.onnx.data", "draft/model.onnx"} & set(files):
        changed = {**files, name: replace(files[name], sha256="0" * 64)}
        other = replace(bundle, manifest=replace(bundle.manifest, files=changed))
        names.add(PreparedEngine.of_bundle(tmp_path, other, "target").source_digest)
    unchanged = PreparedEngine.of_bundle(tmp_path, bundle, "target").source_digest
    assert unchanged in names  # that whose draft differs
    assert len(names) == sum(name.startswith("target/model") for name in files) + 1


@pytest.mark.parametrize(
    ("lacking", "said"), [("room", "bytes are free, it may take"), ("folder", "Not a directory")]
)
def test_without_room_an_engine_opens_as_it_is(tiny_bundle, tmp_path, caplog, lacking, said):
    prepared = PreparedEngine.of_bundle(tmp_path / "engines", tiny_bundle, "target")
    if lacking == "room":
        prepared = replace(prepared, num_bytes=10**18)
    else:
        (tmp_path / "file").touch()
        prepared = replace(prepared, folder=tmp_path / "file" / "engines")
    with caplog.at_level(logging.WARNING):
        session = OrtSession(
            tiny_bundle.model_path("target"), tiny_bundle.entry("target"), prepared=prepared
        )
    session.close()
    assert said in caplog.text and "it opens without one; free some room" in caplog.text
    assert not list(tmp_path.glob("engines/*"))


def test_a_damaged_bundle_is_the_bundles_error_and_a_file_is_no_folder(bundle_copy, tmp_path):
    bundle = open_bundle(bundle_copy)
    (bundle_copy / "target" / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(BundleError, match=r"cannot load .*target.model\.onnx"):
        logits_of(bundle, engine_cache=tmp_path / "engines")
    assert list((tmp_path / "engines").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"engine_cache is .*, which is a file; expected a folder"):
        logits_of(bundle, engine_cache=tmp_path / "file")


def test_what_a_killed_opener_left_is_cleared_and_what_another_makes_stays(tiny_bundle, tmp_path):
    for name in ("killed", "living"):
        (tmp_path / f".new-{name}" / "engine").mkdir(parents=True)
        (tmp_path / f".new-{name}" / "engine" / "model.bin").write_bytes(b"half")
    descriptor = os.open(tmp_path / ".new-living", os.O_RDONLY)
    try:
        assert lock_descriptor(descriptor, blocking=False)
        logits_of(tiny_bundle, engine_cache=tmp_path)
        assert len(list(tmp_path.iterdir())) == 2 and (tmp_path / ".new-living" / "engine").exists()
    finally:
        os.close(descriptor)
