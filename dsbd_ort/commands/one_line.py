"""Base of commands: help in sections, errors as one line."""

import contextlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import click

from dsbd_errors import DsbdError, install_hint
from dsbd_ort.engine.limits import MOST_SECONDS

_LAST_SECTION = "Options"
_ALL = f"{__name__}.all"  # in the context's meta: the help shows rare options too


@contextlib.contextmanager
def packages_of(what: str, *extras: str) -> Iterator[None]:
    """Turn an ImportError in the block into a ClickException that says what to install."""
    try:
        yield
    except ImportError as error:
        raise click.ClickException(
            f"{what} needs a package that is not installed ({error.name}); {install_hint(*extras)}"
        ) from error


class SectionedOption(click.Option):
    """Option with the heading of its help section; only --help-all shows rare options."""

    def __init__(
        self,
        *args: Any,
        section: str = _LAST_SECTION,
        is_rare: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.section = section
        self.is_rare = is_rare

    def make_metavar(self, ctx: click.Context) -> str:
        """Return the name of the values; a range is shown after the help, if at all."""
        return super().make_metavar(ctx).removesuffix(" RANGE")

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Leave out a range whose upper end only keeps numbers within 32 or 64 bits."""
        extra = super().get_help_extra(ctx)
        if (getattr(self.type, "max", None) or 0) >= MOST_SECONDS:
            extra.pop("range", None)
        return extra


class OneLineCommand(click.Command):
    """Command with these exit codes: 0: done. 1: a bug. 2: an error that the user can fix.

    130: Ctrl-C. 141: the reader of the output has ended (as for programs that SIGPIPE ends).

    An error is one line on stderr. ``--debug``, an option of every command, prints the traceback
    before it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        option = click.Option(
            ["--debug"], is_flag=True, help="Print the traceback of an error.", expose_value=False
        )
        option.callback = lambda context, _, wanted: context.meta.update({__name__: wanted})
        self.params.append(option)
        if any(getattr(parameter, "is_rare", False) for parameter in self.params):
            self.params.append(
                click.Option(
                    ["--help-all"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_show_all,
                    help="Show all options and exit.",
                )
            )

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            _say_all_characters()
            try:
                super().main(*args, **kwargs)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()  # here, so that a full disk ends in one line too
        except click.ClickException as error:
            _fail(error.format_message())
        except DsbdError as error:
            _fail(str(error))
        except click.Abort:
            _fail("interrupted", exit_code=130)
        except BrokenPipeError:  # from the last flush
            _end_without_reader()
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

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under the headings of their sections; those without a section last."""
        records: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            is_shown = _ALL in ctx.meta or not getattr(parameter, "is_rare", False)
            record = parameter.get_help_record(ctx) if is_shown else None
            if record is not None and isinstance(parameter, click.Option):
                records.setdefault(getattr(parameter, "section", _LAST_SECTION), []).append(record)
        last = records.pop(_LAST_SECTION)  # --help is always there
        for section, rows in [*records.items(), (_LAST_SECTION, last)]:
            with formatter.section(section):
                formatter.write_dl(rows)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except BrokenPipeError:  # handled here, because click would exit with 1
            _end_without_reader()
        except Exception:
            if context.meta[__name__]:
                traceback.print_exc()
            raise


def _say_all_characters() -> None:
    """Write UTF-8 to pipes and files in any locale; replace characters that a terminal lacks."""
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):  # closed, or a stream of the caller
            continue
        if stream.isatty():
            stream.reconfigure(errors="replace")
        else:  # a lone surrogate, as in a file name, is escaped
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _show_all(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given and not context.resilient_parsing:
        context.meta[_ALL] = True
        click.echo(context.get_help())
        context.exit()


def _end_without_reader() -> NoReturn:
    """Exit as after SIGPIPE: the reader of the output, such as head, has ended."""
    _drop_output()
    sys.exit(128 + signal.SIGPIPE)


def _drop_output() -> None:
    """Discard unwritten output, which would fail again when the interpreter ends."""
    with contextlib.suppress(AttributeError, OSError):  # no stdout, or one without a descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, *, exit_code: int = 2) -> NoReturn:
    click.echo(f"Error: {' '.join(message.split())}", err=True)
    sys.exit(exit_code)
