"""A click command that ends in one line: exit code 2 for what the user can mend."""

from __future__ import annotations

import sys
from typing import Any

import click

from dsbd_ort.decoding import DecodingError
from dsbd_runtime.errors import DsbdError

USER_ERRORS = (DsbdError, DecodingError)


class OneLineCommand(click.Command):
    """Exit 0: done. 2: an error of the user's, as one line on stderr. 130: Ctrl-C. 1: a bug."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command as a program."""
        kwargs["standalone_mode"] = False
        try:
            super().main(*args, **kwargs)
        except click.ClickException as error:
            _fail(error.format_message())
        except USER_ERRORS as error:
            _fail(str(error))
        except click.Abort:
            _fail("interrupted", exit_code=130)
        sys.exit(0)


def _fail(message: str, *, exit_code: int = 2) -> None:
    click.echo(f"Error: {' '.join(message.split())}", err=True)
    sys.exit(exit_code)
