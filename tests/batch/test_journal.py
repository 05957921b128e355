"""The growing output: resumed after its whole lines, and never mistaken for another file."""

import errno
import itertools
import json
import os
import subprocess
import sys

import pytest

from dsbd_ort.batch.job import SYNC_SECONDS, open_journal
from dsbd_ort.batch.prompt_lines import BatchError

HASHES = [f"hash{number}" for number in range(5)]


def line(number):
    return {"version": 1, "line": number, "request": HASHES[number], "text": "é\ud800\u2028"}


def written(path, numbers):
    with open_journal(path) as journal:
        assert journal.resume(HASHES) == numbers[0]
        for number in numbers:
            journal.append(line(number))


def test_a_second_run_goes_on_where_the_first_ended(tmp_path):
    path = tmp_path / "out.jsonl"
    written(path, [0, 1])
    written(path, [2, 3, 4])
    lines = path.read_bytes().decode().split("\n")
    assert [json.loads(text) for text in lines[:-1]] == [line(number) for number in range(5)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("num_bytes", [1, 10, 21, 22, 40, 60])
@pytest.mark.parametrize("tail", [b"", b"\0" * 50])
def test_a_torn_last_line_is_dropped(tmp_path, num_bytes, tail):
    path = tmp_path / "out.jsonl"
    written(path, [0, 1, 2])
    whole = path.read_bytes()
    start = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    path.write_bytes(whole[: start + num_bytes] + tail)
    written(path, [2])
    assert path.read_bytes() == whole


OTHERS = [
    (b"my notes", "line 1 was not written by dsbd-run"),
    (b"my\nnotes\n", "line 1 was not written by dsbd-run"),
    (b'{"prompt": "a"}\n', "line 1 was not written by dsbd-run"),
    (b'{"version": 1, "line": 0}\nmore', "line 1 was not written by dsbd-run"),
]


@pytest.mark.parametrize(("content", "words"), OTHERS)
def test_other_files_are_left_alone(tmp_path, content, words):
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(BatchError, match=words), open_journal(path) as journal:
        journal.resume(HASHES)
    assert path.read_bytes() == content


@pytest.mark.parametrize("hashes", [["hash0", "new"], ["hash0"], []])
def test_changed_inputs_are_refused(tmp_path, hashes):
    path = tmp_path / "out.jsonl"
    written(path, [0, 1])
    before = path.read_bytes()
    wanted = rf"line {min(len(hashes), 1) + 1} is of another input or other options"
    with pytest.raises(BatchError, match=wanted), open_journal(path) as journal:
        journal.resume(hashes)
    assert path.read_bytes() == before


def test_a_longer_input_is_gone_on_with(tmp_path):
    path = tmp_path / "out.jsonl"
    written(path, [0])
    with open_journal(path) as journal:
        assert journal.resume([*HASHES, "more"]) == 1


HOLDER = """
import sys
from pathlib import Path
from dsbd_ort.batch.job import open_journal

with open_journal(Path(sys.argv[1])) as journal:
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """An output that another process writes, in a folder of its own, and that process."""
    path = tmp_path_factory.mktemp("held") / "out.jsonl"
    call = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "open\n"
        yield path, holder
        holder.kill()


def names_of(path):
    """The names by which an output can be reached, each of another kind."""
    folder = path.parent
    yield path
    for name, target in (("link", path.name), ("chain", "link"), ("absolute", path)):
        (folder / name).symlink_to(target)
        yield folder / name
    (folder / "hard").hardlink_to(path)
    yield folder / "hard"
    (folder / "folder").symlink_to(folder)
    yield folder / "folder" / "hard"
    yield folder / ".." / folder.name / path.name


def test_only_one_process_writes(held):
    path, holder = held
    for name in names_of(path):
        with pytest.raises(BatchError, match="is being written by another process; wait for it"):
            with open_journal(name):
                pass
    holder.kill()
    holder.wait()
    written(path.parent / "hard", [0])  # the lock has ended with its process


def test_an_output_by_another_name_is_gone_on_with(tmp_path):
    path = tmp_path / "out.jsonl"
    written(path, [0])
    for number, name in enumerate(names_of(path), start=1):
        if number < len(HASHES):
            written(name, [number])
    assert len(path.read_bytes().splitlines()) == len(HASHES)


def test_one_in_this_process_is_another_too(tmp_path):
    with open_journal(tmp_path / "out.jsonl"):
        with pytest.raises(BatchError, match="is being written by another process"):
            with open_journal(tmp_path / "out.jsonl"):
                pass


def test_an_output_that_cannot_be_locked_is_refused(tmp_path):
    def lock(descriptor, *, blocking):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with pytest.raises(BatchError, match=r"out.jsonl cannot be locked \(No locks available\)"):
        with open_journal(tmp_path / "out.jsonl", lock=lock):
            pass


@pytest.mark.parametrize("name", ["no/such/folder/out", ".", "/dev/null"])
def test_what_cannot_be_written_is_named(tmp_path, name):
    with pytest.raises(BatchError, match=r"--output .* (cannot be written|is not a regular file)"):
        with open_journal(tmp_path / name):
            pass
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_told_now_and_then(tmp_path):
    ticks = itertools.count(0.0, SYNC_SECONDS / 2)
    with open_journal(tmp_path / "out.jsonl", clock=lambda: next(ticks)) as journal:
        journal.resume(HASHES)
        synced = []
        for number in range(4):
            journal.append(line(number))
            synced.append(journal.synced_at)
    assert synced[0] == 0.0 and len(set(synced)) > 2
