"""dsbd-export --bundle: TensorRT engines for a bundle that is there, without its checkpoints."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource
from rich.console import Console

from dsbd_ort.commands.export import print_bundle
from dsbd_ort.commands.termination import orderly_termination

OPTIONS = ("bundle", "engine", "compute_capability", "capacity")


def check_given(context: click.Context) -> None:
    """Raise click.UsageError for an option that only an export of checkpoints has."""
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if given and parameter.expose_value and name not in OPTIONS:
            raise click.UsageError(
                f"--bundle takes its models from the bundle; leave out {parameter.opts[-1]}"
            )


def run(bundle: Path, *, engine: str, compute_capability: str | None, capacity: int | None) -> None:
    """Build the engines and print what the bundle then holds.

    Raises:
        click.ClickException: the packages that the build needs are not installed.
    """
    try:  # here, not at the top: no other command needs onnx
        from dsbd_export.tensorrt_build import add_engines
        from dsbd_export.tensorrt_options import TensorrtOptions
    except ImportError as error:
        raise click.ClickException(
            f"building engines needs a package that is not installed ({error.name}); "
            "run: pip install 'dsbd-ort[tensorrt]' or 'dsbd-ort[tensorrt-rtx]'"
        ) from error
    console = Console(stderr=True)
    options = TensorrtOptions(
        engine=engine, compute_capability=compute_capability, capacity=capacity
    )
    with orderly_termination():
        manifest = add_engines(
            bundle, options, report=lambda line: console.print(line, highlight=False)
        )
    print_bundle(bundle, manifest)
