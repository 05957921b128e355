"""The command dsbd_native_text, and folders of tokenizers as bundles have them."""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from tests.runtime.tokenizer_kinds import KINDS
from tests.tokenizer_corpus import CORPUS, write_tokenizer


def command_in(native_build: Path) -> Path:
    return native_build / "text" / "dsbd_native_text"


def ask(command: Path, folder: Path, requests: Sequence[dict[str, Any]]) -> list[Any]:
    lines = "".join(f"{json.dumps(request)}\n" for request in requests)
    done = subprocess.run(
        [command, folder], input=lines, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@cache
def content_of(kind: str) -> str:
    """Return the tokenizer.json of a kind; those of the corpus as transformers loads them."""
    return _corpus_content(kind) if kind in CORPUS else KINDS[kind]().to_str()


def _corpus_content(kind: str) -> str:
    with tempfile.TemporaryDirectory() as folder, quiet_libraries():
        write_tokenizer(kind, Path(folder))
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return str(loaded.backend_tokenizer.to_str())


def written(kind: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(content_of(kind), encoding="utf-8")
    return folder


ALL_KINDS = list(CORPUS | KINDS)
