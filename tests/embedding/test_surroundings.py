"""The library in hosts that load it late, in a second thread, with another Python's variables."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

from dsbd_ort import Pipeline
from tests.embedding.conftest import PROGRAMS

FOREIGN = {"PYTHONHOME": "/nowhere", "PYTHONPATH": "/nowhere", "LC_ALL": "C"}


def test_loaded_late_in_a_foreign_environment_and_never_closed(
    compiled, c_library, tiny_bundle, tmp_path
):
    folder = tmp_path / "\N{SNOWMAN}"
    shutil.copytree(tiny_bundle.path, folder)
    done = subprocess.run(
        [compiled(PROGRAMS / "loaded.c"), c_library / "libdsbd.so", folder],
        env={**os.environ, **FOREIGN},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    with Pipeline.from_bundle(tiny_bundle.path) as pipeline:
        wanted = pipeline.generate("ab", max_new_tokens=4, seed=0).sequences[0].token_ids
    assert json.loads(done.stdout)["sequences"][0]["token_ids"] == wanted
