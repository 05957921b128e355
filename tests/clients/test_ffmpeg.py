"""Audio files that FFmpeg wrote, to a pipe and one after another: read as FFmpeg reads them."""

import numpy as np
import pytest

from dsbd_ort.audio.audio_files import read_audio
from tests.clients.environments import PROGRAMS, command

pytestmark = [pytest.mark.clients]


def test_files_of_ffmpeg(tmp_path):
    command("av", ["python", str(PROGRAMS / "av_files.py"), str(tmp_path)], tmp_path)
    files = sorted(tmp_path.glob("*.audio"))
    assert len(files) == 35
    for file in files:
        with np.load(file.with_suffix(".npz")) as of_ffmpeg:
            wanted, rate = of_ffmpeg["samples"], int(of_ffmpeg["rate"])
        found = read_audio(file, rate)
        assert len(found) == len(wanted), file.stem
        error = np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2))
        print(f"{file.stem}: {len(found)} samples, relative difference {error:.2g}")
        assert error < 1e-3, file.stem
