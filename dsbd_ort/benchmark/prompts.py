"""Prompts of a benchmark: the built-in table, or those of a file."""

import json
from pathlib import Path

from dsbd_errors import DsbdError

# Signatures end where a token ends: a cut inside a word or an indent would leave half a token,
# which the model never saw in training.
PROMPTS = (
    "def read_json(path):",
    "def find_files(root, pattern):",
    "class Connection:\n    def __init__(self, host, port):",
    "def merge_sorted(left, right):",
    "import os\nimport sys\n\ndef main(argv=None):",
    "def parse_header(line):",
    "async def fetch(self, url, timeout=None):",
    "def test_empty_string(self):",
)


class BenchmarkError(DsbdError, ValueError):
    """Runs or prompts that cannot be measured, files that cannot be written, a missing package."""


def read_prompts(file: Path) -> list[str]:
    """Return the prompts of a file: ``*.jsonl`` has objects with "prompt", others one per line."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"{file} cannot be read as UTF-8 text: {error}") from error
    if not lines:
        raise BenchmarkError(f"{file} has no prompt; write one per line")
    if file.suffix != ".jsonl":
        return lines
    return [_prompt_of(line, f"{file}, line {number}") for number, line in enumerate(lines, 1)]


def _prompt_of(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BenchmarkError(
            f"{where} is invalid JSON ({error}); write one object per line"
        ) from error
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise BenchmarkError(f'{where} has no text under "prompt"; write {{"prompt": "..."}}')
    return prompt
