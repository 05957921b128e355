"""Environments of clients that others wrote, each with its own packages, kept in build/clients."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import filelock

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")
REQUIREMENTS = {  # pinned: docs/serving_reference.md lists the clients that were tested
    "openai": ["openai==3.54.0"],
    "agents": ["openai-agents==0.24.0"],
    "litellm": ["litellm==1.106.2"],
    "langchain": ["langchain-openai==1.7.3"],
    "llama_index": ["llama-index-llms-openai-like==0.8.1"],
    "lm_eval": ["lm-eval[api]==0.4.13", "transformers>=5,<6"],
    "guidellm": ["guidellm==0.8.1"],
    "llama_cpp": ["xllamacpp==2026.10.11549"],
    "av": ["av==18.1.0", "numpy"],  # FFmpeg: judges what is read of audio files
}


def environment(name: str) -> Path:
    """Return the folder of commands of a client's environment, made where it is missing.

    DSBD_CLIENTS names another folder than build/clients.
    """
    folder = Path(os.environ.get("DSBD_CLIENTS", ROOT / "build" / "clients"))
    folder.mkdir(parents=True, exist_ok=True)
    stamp, wanted = folder / name / "requirements.txt", "\n".join(REQUIREMENTS[name])
    with filelock.FileLock(folder / f"{name}.lock"):
        if not stamp.exists() or stamp.read_text() != wanted:
            _run([sys.executable, "-m", "venv", "--clear", str(folder / name)], 120)
            python = str(folder / name / "bin" / "python")
            _run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS[name]], 1800)
            stamp.write_text(wanted)
    return folder / name / "bin"


def program(name: str, url: str, model: str) -> Any:
    """Run the program of a client in its environment; return the object that it prints."""
    python = environment(name) / "python"
    file = PROGRAMS / f"{name}_client.py"
    return json.loads(_run([str(python), str(file), f"{url}/v1", model], 300).splitlines()[-1])


def llama_cpp_ids(model: Path, texts: list[str], folder: Path) -> list[list[int]]:
    """Return the ids that llama.cpp gives texts by the tokenizer of a GGUF file."""
    python = environment("llama_cpp") / "python"
    file, arguments = PROGRAMS / "llama_cpp_tokenize.py", folder / "texts.json"
    arguments.write_text(json.dumps(texts))
    found = _run([str(python), str(file), str(model), str(arguments)], 300)
    ids: list[list[int]] = json.loads(found.splitlines()[-1])
    return ids


def command(name: str, arguments: list[str], home: Path) -> str:
    """Run a command of a client's environment, which may read nothing from elsewhere."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(home)}
    return _run([str(environment(name) / arguments[0]), *arguments[1:]], 600, offline)


def _run(command: list[str], timeout_s: int, more: dict[str, str] | None = None) -> str:
    names = ("PATH", "HOME", "TMPDIR", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE")
    environ = {name: os.environ[name] for name in names if name in os.environ}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env={**environ, **(more or {})}
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
