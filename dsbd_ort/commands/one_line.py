"""Command whose errors end in one line: exit code 2 if the user can fix them."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Any

import click

from dsbd_errors import DsbdError


class OneLineCommand(click.Command):
    """Exit 0: done. 2: an error the user can fix, as one line on stderr. 130: Ctrl-C. 1: a bug.

    ``--debug``, an option of every command, prints the traceback before that line.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        option = click.Option(
            ["--debug"], is_flag=True, help="Print the traceback of an error.", expose_value=False
        )
        option.callback = lambda context, _, wanted: context.meta.update({__name__: wanted})
        self.params.append(option)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command as a program."""
        kwargs["standalone_mode"] = False
        try:
            try:
                super().main(*args, **kwargs)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()  # here, where a full disk still ends in one line
        except click.ClickException as error:
            _fail(error.format_message())
        except DsbdError as error:
            _fail(str(error))
        except click.Abort:
            _fail("interrupted", exit_code=130)
        except BrokenPipeError:  # the reader of the output, such as head, has ended
            _drop_output()
            sys.exit(1)
        except OSError as error:
            _drop_output()
            place = "the output" if error.filename is None else str(error.filename)
            _fail(f"cannot read or write {place}: {error.strerror or error}")
        except Exception as error:
            _fail(
                f"internal error, {type(error).__name__}: {error}; run again with --debug and "
                "report what it shows",
                exit_code=1,
            )
        sys.exit(0)

    def invoke(self, context: click.Context) -> Any:
        """Run the command with its arguments."""
        try:
            return super().invoke(context)
        except Exception:
            if context.meta[__name__]:
                traceback.print_exc()
            raise


def _drop_output() -> None:
    """Discard unwritten output, which would fail again when the interpreter ends."""
    with contextlib.suppress(AttributeError, OSError):  # no stdout, or one without a descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, *, exit_code: int = 2) -> None:
    click.echo(f"Error: {' '.join(message.split())}", err=True)
    sys.exit(exit_code)
