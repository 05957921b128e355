"""Files of arrays that a distillation left: a damaged one is one line that names it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dsbd_distill.acceptance import HeldOutSamples
from dsbd_distill.pool import Pool
from dsbd_distill.work_folder import read_array
from dsbd_export.errors import ExportError

SAMPLES = HeldOutSamples(
    np.zeros((2, 8), np.int64),
    np.zeros((2, 4, 3), np.int64),
    np.zeros((2, 4, 3), np.float32),
    np.ones((2, 4), bool),
)


@pytest.mark.parametrize("kept", [0, 10, 200, "zeros", "other"])
def test_a_damaged_file_is_named_with_the_fix(kept: int | str, tmp_path: Path) -> None:
    file = tmp_path / "held_out.npz"
    SAMPLES.write(file)
    whole = file.read_bytes()
    if kept == "other":
        with file.open("wb") as opened:
            np.savez(opened, other=np.zeros(3))
    elif kept == "zeros":
        file.write_bytes(whole[:60] + bytes(200) + whole[260:])
    else:
        file.write_bytes(whole[: int(kept)])
    with pytest.raises(ExportError, match=r"held_out\.npz is damaged .*; remove it"):
        HeldOutSamples.read(file)


def test_a_damaged_round_is_named_too(tmp_path: Path) -> None:
    pool = object.__new__(Pool)
    object.__setattr__(pool, "folder", tmp_path)
    (tmp_path / "000003.npz").write_bytes(b"PK")
    with pytest.raises(ExportError, match=r"000003\.npz is damaged .*; remove it"):
        pool._read(3, "texts")


@pytest.mark.parametrize("content", [b"", b"PK", b"\x93NUMPY\x01\x00"])
def test_a_damaged_file_of_features_is_named_too(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "000003_texts.npy"
    file.write_bytes(content)
    with pytest.raises(ExportError, match=r"000003_texts\.npy is damaged .*; remove it"):
        read_array(file)
