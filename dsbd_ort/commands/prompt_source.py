"""Where the prompt of dsbd-run comes from: an argument, a file, stdin, or a person's terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import click


def read_prompt(text: str | None, file: Path | None) -> str | None:
    """Return the prompt, None where it is to be asked for at the terminal.

    Raises:
        click.UsageError: there is none, or it is no UTF-8 text.
    """
    if text is None and file is None:
        if sys.stdin is None:  # closed by whoever started this process
            raise click.UsageError("no prompt; give --prompt, --prompt-file or text on stdin")
        if sys.stdin.isatty():
            return None
    if text is None:
        source = "the prompt on stdin" if file is None else f"--prompt-file {file}"
        try:
            text = (sys.stdin.buffer.read() if file is None else file.read_bytes()).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"{source} cannot be read as UTF-8 text: {error}") from error
    if not text:
        raise click.UsageError("the prompt is empty (''); give at least one character")
    return text
