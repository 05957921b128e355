"""dsbd-serve: what runs where the packages of the extra ``serve`` are installed."""

from __future__ import annotations

import click

from dsbd_errors import install_hint
from dsbd_ort.commands.serve_arguments import ServeArguments


def run(arguments: ServeArguments) -> None:
    """Serve until SIGTERM or Ctrl-C; logs go to stderr.

    Raises:
        click.ClickException: the packages of the server are not installed.
    """
    try:  # here, not at the top: they are an extra
        from dsbd_ort.commands.http_server import serve
    except ImportError as error:
        raise click.ClickException(
            f"the server needs a package that is not installed ({error.name}); "
            f"{install_hint('serve')}"
        ) from error
    serve(arguments)
