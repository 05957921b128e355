"""Runs that cannot be prepared are rows with a reason."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from lab.peers.prepare import NotRun, Pair, environment_python, prepare
from tests.lab.peers.samples import peer_of, run_of


def prepared(peer, folder):
    pair = Pair(
        target=folder / "twin" / "target",
        draft=folder / "twin" / "draft",
        bundle_of=lambda precision: folder / f"bundle-{precision}",
    )
    return prepare(peer, pair, folder / "work", 2)


def test_every_run_gets_the_checkpoints_and_what_its_tool_opens(tmp_path):
    peer = peer_of(run_of("a", skip=1), run_of("b", precision="int8"), source="bundle")
    first, second = prepared(peer, tmp_path)
    assert first.python == Path(sys.executable)
    assert first.job.target == str(tmp_path / "twin" / "target")
    assert first.job.folder == str(tmp_path / "bundle-fp32")
    assert (first.job.options, first.job.num_threads) == ({"skip": 1}, 2)
    assert second.job.folder == str(tmp_path / "bundle-int8")


def made_by_hand(folder, installs):
    """An environment whose Python is this one, so that no installation is needed."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / ".installed").write_text("\n".join(" ".join(words) for words in installs))
    return folder


def test_an_environment_that_has_what_is_wanted_stays(tmp_path):
    installs = (("torch==1",), ("tool==2", "torch==1"))
    folder = made_by_hand(tmp_path / "venv", installs)
    assert environment_python(folder, installs) == folder / "bin" / "python"


def test_what_cannot_be_installed_is_named_in_every_row(tmp_path):
    peer = replace(
        peer_of(run_of("a"), run_of("b", precision="int8")),
        installs=(("--no-index", "--no-deps", "dsbd-ort-nowhere==1"),),
    )
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
