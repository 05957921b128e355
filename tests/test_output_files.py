"""Output files that are written whole: by one process at a time, through links, to a pipe."""

import os
from pathlib import Path

import pytest

from dsbd_ort.batch.job import open_journal
from dsbd_ort.output_files import write_whole


def test_a_text_takes_the_place_of_a_longer_one(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    for text in ("a long é\n" * 9, "short", ""):
        write_whole(link, text)
        assert file.read_text("utf-8") == text and link.is_symlink()


def test_a_file_that_another_one_writes_is_left_as_it_is(tmp_path):
    file, hard = tmp_path / "file", tmp_path / "hard"
    with open_journal(file) as journal:
        journal.append({"version": 1})
        hard.hardlink_to(file)
        with pytest.raises(OSError, match="another process is writing to it"):
            write_whole(hard, "report")
    assert file.read_text() == '{"version": 1}\n'
    write_whole(hard, "report")
    assert file.read_text() == "report"


def test_what_is_no_regular_file_is_written_too(tmp_path):
    read_end, write_end = os.pipe()
    write_whole(Path(f"/dev/fd/{write_end}"), "report")
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        assert pipe.read() == b"report"
    write_whole(Path("/dev/null"), "report")


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        write_whole(tmp_path / "no" / "file", "report")
