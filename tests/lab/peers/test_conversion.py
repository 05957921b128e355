"""Conversions: made once, made anew for other checkpoints, whole or absent."""

from __future__ import annotations

import pytest

from lab.peers.catalog import PeerError
from lab.peers.prepare import checkpoint_key, conversion_key, converted_folder
from tests.lab.peers.samples import ready_run, run_of, start_fake

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
