"""Lessons on disk: what was written is read, and a damaged file is one line that names it."""

from __future__ import annotations

import numpy as np
import pytest

from dsbd_distill.lesson import Lesson
from dsbd_export.errors import ExportError

COUNTED = np.arange(28).reshape(4, 7) < 25  # the last row ends three places before the others
ROWS = Lesson(
    np.arange(40, dtype=np.uint32).reshape(4, 10),
    np.arange(56, dtype=np.uint32).reshape(4, 7, 2),
    np.full((4, 7, 2), -1.0, np.float32),
    COUNTED,
    tuple(np.full((num, 5), num, np.int16) for num in (9, 9, 9, 6)),
)


def test_what_was_written_is_read(tmp_path):
    file = tmp_path / "rows.npz"
    ROWS.write(file)
    read = Lesson.read(file, with_features=True)
    for name in ("tokens", "counted"):
        assert np.array_equal(getattr(read, name), getattr(ROWS, name))
    for name in ("ids", "log_probs"):
        found, wanted = getattr(read, name), getattr(ROWS, name)
        assert np.array_equal(found[COUNTED], wanted[COUNTED]) and not found[~COUNTED].any()
    last = read.at(slice(3, 4))
    assert len(last.tokens) == 1 and last.features[0].tolist() == [[6] * 5] * 6
    assert Lesson.read(file).features is None
    assert Lesson.is_stored(file, with_features=True)
    (tmp_path / "rows.npy").unlink()
    assert not Lesson.is_stored(file, with_features=True)


@pytest.mark.parametrize("kept", [0, 10, 200, "zeros", "other"])
def test_a_damaged_file_is_named_with_the_fix(kept, tmp_path):
    file = tmp_path / "held_out.npz"
    ROWS.write(file)
    whole = file.read_bytes()
    if kept == "other":
        with file.open("wb") as opened:
            np.savez(opened, other=np.zeros(3))
    elif kept == "zeros":
        file.write_bytes(whole[:60] + bytes(200) + whole[260:])
    else:
        file.write_bytes(whole[: int(kept)])
    with pytest.raises(ExportError, match=r"held_out\.npz is damaged .*; remove it"):
        Lesson.read(file)


@pytest.mark.parametrize("content", [b"", b"PK", b"\x93NUMPY\x01\x00"])
def test_a_damaged_file_of_features_is_named_too(content, tmp_path):
    ROWS.write(tmp_path / "rows.npz")
    (tmp_path / "rows.npy").write_bytes(content)
    with pytest.raises(ExportError, match=r"rows\.npy is damaged .*; remove it"):
        Lesson.read(tmp_path / "rows.npz", with_features=True)
