"""The commands' entry points: arguments to options to one command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from dsbd_ort.benchmark.default_runs import DEFAULT_STRATEGIES, CommonSettings
from dsbd_ort.commands import bench as bench_command
from dsbd_ort.commands import build_engines
from dsbd_ort.commands import export as export_command
from dsbd_ort.commands import inspect as inspect_command
from dsbd_ort.commands.decoding_options import decoding_options
from dsbd_ort.commands.families import print_families
from dsbd_ort.commands.number_types import COUNT, COUNT_OR_NONE, TOLERANCE, IntList
from dsbd_ort.commands.one_line import OneLineCommand
from dsbd_ort.commands.run_arguments import run_from_arguments
from dsbd_ort.commands.run_conflicts import check_options
from dsbd_ort.commands.serve_arguments import serve_from_arguments, serve_options
from dsbd_ort.decoding.option_table import MOST_BEAMS, MOST_NODES
from dsbd_ort.version import __version__

draft_provider_option = click.option(
    "--draft-provider", help="Where the draft runs [where the target does]."
)
cuda_graphs_option = click.option(
    "--cuda-graphs", is_flag=True, help="On cuda: capture each size of call once and replay it."
)


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
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder of the bundle.")
@click.option(
    "--bundle",
    type=click.Path(path_type=Path),
    help="Build TensorRT engines for this bundle from its ONNX files; takes no checkpoint.",
)
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
@click.option(
    "--attention",
    default="fused",
    show_default=True,
    help="fused, or grouped: query heads that share a key head become rows of one head.",
)
@click.option("--max-context", type=COUNT, help="Cap the context length of the bundle.")
@click.option(
    "--engine",
    default="onnx",
    show_default=True,
    help="onnx; tensorrt or tensorrt-rtx: TensorRT engines beside the ONNX files.",
)
@click.option(
    "--compute-capability",
    metavar="12.0",
    help="GPU that a tensorrt-rtx engine is for; by default the one of this machine.",
)
@click.option(
    "--capacity", type=COUNT, help="Cache rows of TensorRT engines; default: the context."
)
@click.option("--revision", help="Branch, tag or commit on the hub.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that a checkpoint brings along.")
@click.option("--atol", type=TOLERANCE, help="Largest logit error allowed in fp32 (1e-4).")
@click.option("--max-kl", type=TOLERANCE, help="Largest mean KL divergence allowed in all else.")
@click.pass_context
def export(context: click.Context, /, bundle: Path | None, demo: bool, **options: Any) -> None:
    """Turn a draft and a target checkpoint into a bundle of two engines."""
    if bundle is None:
        export_command.run(options, demo=demo)
    else:
        build_engines.check_given(context)
        build_engines.run(
            bundle, **{name: options[name] for name in build_engines.OPTIONS if name != "bundle"}
        )


@click.command(cls=OneLineCommand)
@click.version_option(__version__)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompt", help="Text to continue, or what the user says in a --chat.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="File with the text.")
@click.option("--input", type=click.Path(path_type=Path), help="JSONL file with many prompts.")
@click.option("--output", type=click.Path(path_type=Path), help="JSONL file for their answers.")
@click.option("--workers", type=COUNT, help="Processes that answer --input [1].")
@click.option(
    "--concurrency",
    type=COUNT,
    help="Lines of --input that share the engine calls of one process [1].",
)
@click.option(
    "--cluster",
    metavar="ADDRESS",
    help="Answer --input on a Ray cluster, HOST:PORT or auto; --output is a folder then.",
)
@click.option("--replicas", type=COUNT, help="Actors of the --cluster that answer [1].")
@click.option("--chat", is_flag=True, help="Fill the prompt into the checkpoint's chat template.")
@click.option("--system", metavar="TEXT", help="The system message of a --chat.")
@decoding_options
@click.option("--provider", default="cpu", show_default=True, help="Execution provider.")
@draft_provider_option
@click.option(
    "--threads",
    type=COUNT,
    help="Threads of the target, and of a large draft; --workers or --replicas share them.",
)
@cuda_graphs_option
@click.option("--verify", is_flag=True, help="Check the hash of every file first.")
@click.option(
    "--no-prefix-cache", is_flag=True, help="Compute every prompt anew, whatever came before it."
)
@click.option("--stream", is_flag=True, help="Print text as soon as all live beams agree on it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per prompt.")
@click.option("--stats", is_flag=True, help="Print statistics to stderr.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="Draw every iteration's forest: a page (.html), or its data (.json).",
)
@click.pass_context
def run(context: click.Context, /, **arguments: Any) -> None:
    """Continue a prompt with a bundle.

    The prompt may also come from stdin; at a terminal one is asked for after another.
    """
    given = {
        parameter.opts[0]
        for parameter in context.command.params
        if arguments.get(parameter.name or "") not in (None, False, ())
    }
    check_options(given, arguments["num_return_sequences"])
    sys.exit(run_from_arguments(**arguments))


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
@click.option(
    "--num-beams", type=IntList(1, MOST_BEAMS), default="2,4", show_default=True, help="All widths."
)
@click.option("--draft-length", type=COUNT, help="Of strategies that draft.")
@click.option("--draft-beams", type=IntList(1, MOST_NODES), help="Of strategies that draft a tree.")
@click.option(
    "--top-k", type=COUNT_OR_NONE, default=20, show_default=True, help="Of those that sample."
)
@click.option("--max-new-tokens", type=COUNT, default=64, show_default=True)
@click.option("--repetitions", type=COUNT, default=5, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**128 - 1), default=0, show_default=True)
@click.option("--provider", default="cpu", show_default=True, help="Execution provider.")
@draft_provider_option
@click.option("--threads", type=COUNT, help="Threads of the target, and of a large draft.")
@cuda_graphs_option
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


@click.command(cls=OneLineCommand)
@click.version_option(__version__)
@click.argument("bundle", type=click.Path(path_type=Path))
@serve_options
@click.option("--provider", default="cpu", show_default=True, help="Execution provider.")
@draft_provider_option
@click.option("--threads", type=COUNT, help="Threads of the target, and of a large draft.")
@cuda_graphs_option
@click.option("--verify", is_flag=True, help="Check the hash of every file first.")
@click.option(
    "--no-prefix-cache", is_flag=True, help="Compute every prompt anew, whatever came before it."
)
def serve(**arguments: Any) -> None:
    """Answer OpenAI's HTTP interface with a bundle, many requests at a time."""
    serve_from_arguments(**arguments)
