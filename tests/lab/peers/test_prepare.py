"""Conversions, and runs that cannot be prepared: made once, or rows with a reason."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lab.peers.catalog import PeerError
from lab.peers.prepare import (
    NotRun,
    Pair,
    checkpoint_key,
    conversion_key,
    converted_folder,
    environment_python,
    prepare,
)
from tests.lab.peers.samples import peer_of, ready_run, run_of, start_fake


def prepared(peer, folder):
    checkpoints = {role: folder / "twin" / role for role in ("target", "draft")}
    pair = Pair(**checkpoints, bundle_of=lambda precision: folder / f"bundle-{precision}")
    return prepare(peer, pair, folder / "work", 2)


def test_every_run_gets_the_checkpoints_and_what_its_tool_opens(tmp_path):
    peer = peer_of(run_of("a", skip=1), run_of("b", precision="int8"), source="bundle")
    first, second = prepared(peer, tmp_path)
    assert first.python == Path(sys.executable)
    assert first.job.target == str(tmp_path / "twin" / "target")
    assert first.job.folder == str(tmp_path / "bundle-fp32")
    assert (first.job.options, first.job.num_threads) == ({"skip": 1}, 2)
    assert second.job.folder == str(tmp_path / "bundle-int8")


def test_an_environment_that_has_what_is_wanted_stays(tmp_path):
    installs, folder = (("torch==1",), ("tool==2", "torch==1")), tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / ".installed").write_text("\n".join(" ".join(words) for words in installs))
    assert environment_python(folder, installs) == folder / "bin" / "python"


def test_what_cannot_be_installed_is_named_in_every_row(tmp_path):
    peer = peer_of(run_of("a"), run_of("b", precision="int8"))
    peer = replace(peer, installs=(("--no-index", "--no-deps", "dsbd-ort-nowhere==1"),))
    runs = prepared(peer, tmp_path)
    assert [run.run.name for run in runs] == ["a", "b"]
    for run in runs:
        assert run.reason.startswith("not installed: ERROR") and "dsbd-ort-nowhere" in run.reason


def test_what_a_tool_is_unable_to_do_needs_nothing_of_it(tmp_path):
    unable = replace(run_of("beams"), unable="not run: it has one beam")
    peer = replace(peer_of(unable), installs=(("dsbd-ort-nowhere==1",),))
    (run,) = prepared(peer, tmp_path)
    assert isinstance(run, NotRun) and run.reason == "not run: it has one beam"
    assert not (tmp_path / "work").exists()
    able, other = prepared(peer_of(unable, run_of("one beam")), tmp_path)[::-1]
    assert able.key == ("fake", "one beam", "fp32") and isinstance(other, NotRun)


FILES = ("model.safetensors", "config.json", "tokenizer.json")


def checkpoint(folder):
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_key_changes_with_every_file_of_both_checkpoints(tmp_path, role, name):
    folders = [checkpoint(tmp_path / role) for role in ("target", "draft")]
    before = checkpoint_key(*folders)
    (tmp_path / role / "README.md").write_text("words")
    assert checkpoint_key(*folders) == before
    (tmp_path / role / name).write_text(name.upper())  # as long as before
    assert checkpoint_key(*folders) != before


def test_the_key_changes_with_versions_and_converter(tmp_path):
    converter = tmp_path / "run.py"
    converter.write_text("a")
    before = conversion_key("k", (("tool==1",),), converter)
    assert before == conversion_key("k", (("tool==1",),), converter)
    assert before != conversion_key("k", (("tool==2",),), converter)
    assert before != conversion_key("l", (("tool==1",),), converter)
    converter.write_text("b")
    assert before != conversion_key("k", (("tool==1",),), converter)


def converting(log):
    def convert(folder):
        run = ready_run(run_of(precision=folder.name), folder)
        with start_fake(run, log) as process:
            process.convert()

    return convert


def test_a_conversion_is_made_once(tmp_path):
    folder = converted_folder(tmp_path / "models" / "fp32", converting(tmp_path / "log"))
    assert (folder / "model").read_text() == "fp32"
    assert converted_folder(folder, lambda partial: pytest.fail("made again")) == folder
    assert [item.name for item in folder.parent.iterdir()] == ["fp32"]


def test_a_conversion_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(PeerError, match="convert: ValueError: no int8 here"):
        converted_folder(tmp_path / "models" / "int8", converting(tmp_path / "log"))
    assert list((tmp_path / "models").iterdir()) == []
