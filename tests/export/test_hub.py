"""Hub ids: the cache and HF_HUB_OFFLINE are honoured, code of a checkpoint does not run unasked."""

import os
import shutil
import subprocess
import sys

import pytest

from dsbd_export.errors import ExportError
from tests.export.conftest import edit_json, opened

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OPEN_PAIR = """
import sys
from pathlib import Path
from dsbd_export.opening import open_pair
from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError

for revision in (None, "v1", "v2"):
    try:
        options = {"target": "someone/tiny", "draft": "someone/tiny", "output": Path("out")}
        target, _ = open_pair(ExportConfig(**options, revision=revision))
        print(target.folder.name, target.family)
    except ExportError as error:
        print(error)
"""


@pytest.fixture
def hub_cache(llama_folder, tmp_path):
    """A cache as huggingface_hub lays it out, holding someone/tiny at "main" and "v1"."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(llama_folder, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    for name in ("main", "v1"):
        (repository / "refs" / name).write_text(COMMIT)
    return tmp_path / "hub"


def test_a_hub_id_is_found_in_the_cache_without_network(hub_cache):
    environment = {
        **os.environ,
        "HF_HUB_CACHE": str(hub_cache),
        "HF_HUB_OFFLINE": "1",  # read when huggingface_hub is imported, hence the new process
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", OPEN_PAIR], env=environment, capture_output=True, text=True
    )
    newest, tagged, missing = done.stdout.splitlines()
    assert newest == tagged == f"{COMMIT} llama"
    words = "someone/tiny is no local folder and cannot be downloaded from the hub"
    assert missing.startswith(words)


@pytest.fixture
def checkpoint_with_code(llama_folder, tmp_path):
    """A family of its own, whose code leaves a trace when it runs."""
    folder = shutil.copytree(llama_folder, tmp_path / "with_code")
    auto_map = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    edit_json(folder / "config.json", model_type="own_family", auto_map=auto_map)
    (folder / "own_code.py").write_text(
        f"open({str(tmp_path / 'trace')!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_family'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    return folder


def test_code_of_a_checkpoint_runs_only_when_it_is_trusted(checkpoint_with_code, tmp_path):
    with pytest.raises(ExportError, match=r"cannot be read.*trust_remote_code"):
        opened(checkpoint_with_code)
    assert not (tmp_path / "trace").exists()
    checkpoint = opened(checkpoint_with_code, trust_remote_code=True)
    assert (checkpoint.family, checkpoint.vocab_size) == ("own_family", 300)
    assert (tmp_path / "trace").exists()
