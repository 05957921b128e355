"""One prompt after another at a terminal: Ctrl-C ends an answer, Ctrl-D all."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click

from dsbd_errors import DsbdError
from dsbd_ort.answer import Answer
from dsbd_ort.interruption import watched_signals

PROMPT_SIGN = ">>> "


def talk(
    respond: Callable[[str, Callable[[], bool]], Answer], read_line: Callable[[], str]
) -> None:
    """Read and answer until there is nothing more to read.

    Args:
        respond: takes a text and what tells whether to stop; prints and returns the answer.
        read_line: returns the next text; raises EOFError at the end.
    """
    while True:
        try:
            text = read_line()
        except EOFError:
            click.echo(err=True)
            return
        except KeyboardInterrupt:
            click.echo(err=True)
            continue
        if not text.strip():
            continue
        with watched_signals() as interruption:
            try:
                respond(text, interruption.is_wanted)
            except DsbdError as error:
                click.echo(f"Error: {error}", err=True)
        if interruption.is_termination:
            raise SystemExit(interruption.exit_code)


def line_of_terminal() -> str:
    """Read one line from the person at the terminal, with editing and history where there is."""
    try:
        import readline  # noqa: F401 - input() uses it; only a terminal may see what it prints
    except ImportError:
        pass
    if sys.stdout.isatty():
        return input(PROMPT_SIGN)
    click.echo(PROMPT_SIGN, nl=False, err=True)  # stdout is a file, which is for answers
    return input()
