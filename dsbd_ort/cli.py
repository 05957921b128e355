"""Console scripts: one click command for each, whose options are the fields of its arguments."""

from __future__ import annotations

import sys

import click

from dsbd_ort.commands import bench as bench_command
from dsbd_ort.commands import export as export_command
from dsbd_ort.commands import inspect as inspect_command
from dsbd_ort.commands import run as run_command
from dsbd_ort.commands import serve as serve_command
from dsbd_ort.commands.bench import BenchArguments
from dsbd_ort.commands.export import ExportArguments, print_families
from dsbd_ort.commands.inspect import JSON_FIELDS, InspectArguments
from dsbd_ort.commands.options import command, given_flags
from dsbd_ort.commands.run_arguments import RunArguments
from dsbd_ort.commands.serve import ServeArguments


def _list_families(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given and not context.resilient_parsing:
        print_families()
        context.exit()


@command(ExportArguments)
@click.option(
    "--list-families",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_families,
    help="Print which model families can be exported, and how.",
)
def export(arguments: ExportArguments) -> None:
    """Turn a draft and a target checkpoint into a bundle of two engines."""
    export_command.run(arguments, given_flags(click.get_current_context()))


@command(RunArguments)
def run(arguments: RunArguments) -> None:
    """Continue a prompt with a bundle.

    The prompt may also be given on stdin; at a terminal prompts are read one after another.
    """
    arguments.check(given_flags(click.get_current_context()).values())
    sys.exit(run_command.run(arguments))


@command(BenchArguments)
def bench(arguments: BenchArguments) -> None:
    """Measure strategies side by side: speed, quality, and whether the tokens are the same."""
    bench_command.run(arguments)


@command(InspectArguments, epilog=JSON_FIELDS)
def inspect(arguments: InspectArguments) -> None:
    """Show the contents of a bundle, its memory, and which providers can run it here."""
    inspect_command.run(arguments)


@command(ServeArguments)
def serve(arguments: ServeArguments) -> None:
    """Serve a bundle over OpenAI's HTTP interface, many requests at a time."""
    serve_command.run(arguments)
