"""The program of docs/embedding.md compiles with the commands that stand there, and runs."""

import json
import re
import subprocess

from dsbd_ort import Pipeline
from tests.embedding.conftest import ROOT, STRICT

DOCUMENT = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
PROMPT = "def read_json(path):"
OPTIONS = {"num_beams": 2, "max_new_tokens": 32, "seed": 1}


def block(language, begins):
    [found] = re.findall(rf"^```{language}\n({re.escape(begins)}.*?)^```$", DOCUMENT, re.M | re.S)
    return str(found)


def test_it_compiles_and_says_what_python_says(c_library, tiny_bundle, tmp_path):
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "c_library").symlink_to(c_library)
    (tmp_path / "bundle").symlink_to(tiny_bundle.path)
    (tmp_path / "complete.c").write_text(block("c", "/* complete.c"))
    commands = block("sh", "cc complete.c").splitlines()
    commands[0] = commands[0].replace("cc ", f"cc -std=c99 {' '.join(STRICT)} ", 1)
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(commands)], cwd=tmp_path, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
    with Pipeline.from_bundle(tiny_bundle.path, num_threads=2) as pipeline:
        wanted = pipeline.generate(PROMPT, **OPTIONS).sequences[0]
    text, _, result = done.stdout.decode().rstrip("\n").rpartition("\n")
    assert text == wanted.text
    assert json.loads(result)["sequences"][0]["token_ids"] == wanted.token_ids
