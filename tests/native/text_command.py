"""The command dsbd_native_text, folders of tokenizers as bundles have them, checks of text."""

import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import AutoTokenizer

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_export.gate.text_checks import write_text_checks
from dsbd_runtime.bundle_files.bundle import TEXT_CHECKS_FILE, open_bundle
from tests.runtime.bundle_edits import with_files, with_listed
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


def with_checks(
    bundle: Path,
    folder: Path,
    change: Callable[[dict[str, Any]], None] = lambda checks: None,
    text_by_name: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Return a copy of a bundle with more files and the checks of its text; some are changed."""
    with_files(bundle, folder, text_by_name)
    write_text_checks(folder, open_bundle(folder).manifest.target.bos_token_id)
    checks = json.loads((folder / TEXT_CHECKS_FILE).read_text(encoding="utf-8"))
    (folder / TEXT_CHECKS_FILE).unlink()  # it is not listed yet
    change(checks)
    return with_listed(folder, {TEXT_CHECKS_FILE: json.dumps(checks)})


ALL_KINDS = list(CORPUS | KINDS)
