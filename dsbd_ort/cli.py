"""The commands' entry points: arguments to options to one command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from dsbd_ort.commands import export as export_command
from dsbd_ort.commands import run as run_command
from dsbd_ort.commands.decoding_options import decoding_options
from dsbd_ort.commands.one_line import OneLineCommand
from dsbd_ort.version import __version__


@click.command(cls=OneLineCommand)
@click.version_option(__version__)
@click.option("--target", help="Checkpoint folder or hub id of the large model.")
@click.option("--draft", help="Checkpoint folder or hub id of the small model.")
@click.option("--demo", is_flag=True, help="Export the demo pair that ships with this package.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--dtype", default="fp32", show_default=True)
@click.option("--quantize", default="none", show_default=True)
@click.option("--logits", default="full", show_default=True)
@click.option("--max-context", type=int, help="Cap the context length of the bundle.")
@click.option("--engine", default="onnx", show_default=True)
@click.option("--revision", help="Branch, tag or commit on the hub.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that a checkpoint brings along.")
@click.option("--atol", default=1e-4, show_default=True, help="Largest logit error allowed.")
def export(demo: bool, **options: Any) -> None:
    """Turn a draft and a target checkpoint into a bundle of two engines."""
    export_command.run(options, demo=demo)


@click.command(cls=OneLineCommand)
@click.version_option(__version__)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompt", help="Text to continue.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="File with the text.")
@decoding_options
@click.option("--provider", default="cpu", show_default=True, help="Execution provider.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of each engine.")
@click.option("--verify", is_flag=True, help="Check the hash of every file first.")
@click.option("--stream", is_flag=True, help="Print text as soon as all live beams agree on it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--stats", is_flag=True, help="Print statistics to stderr.")
def run(
    bundle: Path,
    prompt: str | None,
    prompt_file: Path | None,
    provider: str,
    threads: int | None,
    verify: bool,
    stream: bool,
    as_json: bool,
    stats: bool,
    **options: Any,
) -> None:
    """Continue a prompt with a bundle. The prompt may also come from stdin."""
    if stream and as_json:
        raise click.UsageError("--stream prints text as it comes, --json one object; use one")
    run_command.run(
        run_command.RunRequest(
            bundle=bundle,
            prompt=_prompt(prompt, prompt_file),
            options={name: value for name, value in options.items() if value is not None},
            provider=provider,
            num_threads=threads,
            verify=verify,
            stream=stream,
            as_json=as_json,
            stats=stats,
        )
    )


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise click.UsageError("give --prompt or --prompt-file, not both")
    if file is not None:
        try:
            prompt = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(
                f"--prompt-file {file} cannot be read as UTF-8 text: {error}"
            ) from error
    elif prompt is None:
        if sys.stdin.isatty():
            raise click.UsageError("no prompt; give --prompt, --prompt-file or text on stdin")
        prompt = sys.stdin.read()
    if not prompt:
        raise click.UsageError("the prompt is empty (''); give at least one character")
    return prompt
