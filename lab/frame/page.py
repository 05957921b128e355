"""The page that a measurement writes: its sections, and the tables and cells in them."""

import dataclasses
import datetime
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dsbd_ort.benchmark.bootstrap import Estimate, Spread
from dsbd_ort.benchmark.machine import this_machine
from scripts.document_sections import text_around, write_section
from scripts.machine import wait_until_idle

ROOT = Path(__file__).resolve().parents[2]
DOCS, RESULTS, BUILD = ROOT / "docs", ROOT / "lab" / "results", ROOT / "build"

BUNDLES = click.argument(
    "bundles", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path)
)
BUNDLE = click.argument("bundle", type=click.Path(exists=True, path_type=Path))


@dataclass
class Page:
    """A document with measured sections, and the conditions that are noted in them.

    Attributes:
        document: Markdown; a section is between ``<!-- name -->`` and ``<!-- end of name -->``.
        threads: threads of an engine call.
        wait: maximum seconds that ``begin`` waits for an idle machine; None: it does not wait.
        idle: share of the cores that was idle after waiting.
    """

    document: Path
    threads: int
    wait: float | None = None
    idle: float | None = None

    def begin(self, *sections: str) -> None:
        """Check early that the document has these sections; then wait for an idle machine.

        Raises:
            click.ClickException: see ``write_section``.
        """
        for section in sections:
            text_around(self.document, section)
        if self.wait is not None:
            self.idle = wait_until_idle(self.wait)

    def write(self, section: str, lines: Iterable[str], *details: str) -> None:
        """Print lines and the conditions of their measurement; write both into the section."""
        if self.idle is not None:
            details = (*details, f"the cores {self.idle:.0%} idle before")
        text = "\n".join([*lines, "", measured_here(self.threads, *details)])
        click.echo(text)
        write_section(self.document, section, text)


def writes(document: Path, *, is_timed: bool = True) -> Callable[..., Any]:
    """Add options --threads, --document and, if timed, --wait; the command receives ``page``."""
    options = [
        click.option("--threads", default=2, show_default=True, help="Threads of an engine call."),
        click.option(
            "--document",
            type=click.Path(path_type=Path),
            default=document,
            help=f"Page to write [{document.relative_to(ROOT)}].",
        ),
    ]
    if is_timed:
        help_text = "Maximum seconds to wait for an idle machine."
        options.append(click.option("--wait", default=60.0, show_default=True, help=help_text))

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(
            threads: int, document: Path, wait: float | None = None, **arguments: Any
        ) -> Any:
            return function(page=Page(document, threads, wait), **arguments)

        for option in options:
            command = option(command)
        return command

    return decorate


def spread_cell(times: Spread) -> str:
    """Return median and quartiles: 12.3 (11.9 to 12.8)."""
    return f"{times.median:.1f} ({times.quartile_1:.1f} to {times.quartile_3:.1f})"


def ratio_cell(ratio: Estimate | Spread) -> str:
    """Return a ratio with its interval, or its quartiles: **1.23** (1.20 to 1.27)."""
    value, low, high = dataclasses.astuple(ratio)
    return f"**{value:.2f}** ({low:.2f} to {high:.2f})"


def measured_here(threads: int, *details: str) -> str:
    """Return the conditions of a measurement: date, processor, threads, ``details``."""
    parts = (str(datetime.date.today()), this_machine().processor, f"{threads} threads", *details)
    return ", ".join(parts) + "."
