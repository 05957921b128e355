"""The commands' entry points: arguments to options to one command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from dsbd_ort.benchmark.default_runs import DEFAULT_STRATEGIES, CommonSettings
from dsbd_ort.commands import bench as bench_command
from dsbd_ort.commands import export as export_command
from dsbd_ort.commands import inspect as inspect_command
from dsbd_ort.commands import run as run_command
from dsbd_ort.commands.decoding_options import IntList, decoding_options
from dsbd_ort.commands.families import print_families
from dsbd_ort.commands.one_line import OneLineCommand
from dsbd_ort.version import __version__


def _list_families(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        print_families()
        context.exit()


@click.command(cls=OneLineCommand)
@click.version_option(__version__)
@click.option(
    "--list-families",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_families,
    help="Print which model families can be exported, and how.",
)
@click.option("--target", help="Checkpoint folder or hub id of the large model.")
@click.option("--draft", help="Checkpoint folder or hub id of the small model.")
@click.option("--demo", is_flag=True, help="Export the demo pair that ships with this package.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--dtype", default="fp32", show_default=True, help="fp32, fp16 or bf16.")
@click.option(
    "--quantize", default="none", show_default=True, help="none, int8-dynamic, int8 or int4."
)
@click.option(
    "--logits",
    default="full",
    show_default=True,
    help="full, or topk:K: engines return only the K largest of a row.",
)
@click.option("--max-context", type=int, help="Cap the context length of the bundle.")
@click.option("--engine", default="onnx", show_default=True)
@click.option("--revision", help="Branch, tag or commit on the hub.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that a checkpoint brings along.")
@click.option("--atol", type=float, help="Largest logit error allowed in fp32 (1e-4).")
@click.option("--max-kl", type=float, help="Largest mean KL divergence allowed in all else.")
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
@click.option(
    "--threads", type=click.IntRange(min=1), help="Threads of the target, and of a large draft."
)
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


@click.command(cls=OneLineCommand)
@click.version_option(__version__)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--strategies",
    default="",
    help=f"Names with commas between; baselines join them [{','.join(DEFAULT_STRATEGIES)}].",
)
@click.option(
    "--run",
    "runs",
    multiple=True,
    metavar="TEXT",
    help="A strategy and its options, 'dsbd num_beams=4 width_policy=fixed', with name= and "
    "baseline= if wanted. May be repeated.",
)
@click.option("--prompts", type=click.Path(path_type=Path), help="One a line, or *.jsonl.")
@click.option("--num-beams", type=IntList(), default="2,4", show_default=True, help="All widths.")
@click.option("--draft-length", type=click.IntRange(min=1), help="Of strategies that draft.")
@click.option("--draft-beams", type=IntList(), help="Of strategies that draft a tree.")
@click.option("--top-k", type=int, default=20, show_default=True, help="Of those that sample.")
@click.option("--max-new-tokens", type=int, default=64, show_default=True)
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--provider", default="cpu", show_default=True, help="Execution provider.")
@click.option(
    "--threads", type=click.IntRange(min=1), help="Threads of the target, and of a large draft."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all of it here.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Write plots here.")
def bench(
    strategies: str,
    num_beams: int | tuple[int, ...],
    draft_length: int | None,
    draft_beams: int | tuple[int, ...] | None,
    top_k: int,
    max_new_tokens: int,
    threads: int | None,
    **options: Any,
) -> None:
    """Measure strategies side by side: speed, quality, and whether the tokens are the same."""
    common = CommonSettings(
        num_beams=(num_beams,) if isinstance(num_beams, int) else num_beams,
        draft_length=draft_length,
        draft_beams=draft_beams,
        top_k=top_k,
        max_new_tokens=max_new_tokens,
    )
    names = [name.strip() for name in strategies.split(",") if name.strip()]
    bench_command.run(
        bench_command.BenchRequest(strategies=names, common=common, num_threads=threads, **options)
    )


@click.command(cls=OneLineCommand, epilog=inspect_command.JSON_FIELDS)
@click.version_option(__version__)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Check the hash of every file too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(bundle: Path, verify: bool, as_json: bool) -> None:
    """Show what is in a bundle, what it needs, and which providers can run it here."""
    inspect_command.run(bundle, verify=verify, as_json=as_json)


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
