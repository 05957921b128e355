"""Console scripts: one click command each; its options are the fields of its arguments class."""

import sys

import click

from dsbd_ort.commands import bench as bench_command
from dsbd_ort.commands import distill as distill_command
from dsbd_ort.commands import export as export_command
from dsbd_ort.commands import inspect as inspect_command
from dsbd_ort.commands import run as run_command
from dsbd_ort.commands.one_line import packages_of
from dsbd_ort.commands.options import command, given_flags
from dsbd_ort.commands.progress import slow_phases
from dsbd_ort.commands.run_arguments import RunArguments
from dsbd_ort.commands.serve_arguments import ServeArguments

# \b keeps click from wrapping the lines of a paragraph.
EXPORT_EXAMPLES = """\b
Examples:
  dsbd-export --demo -o bundle/
  dsbd-export --target TARGET --draft DRAFT --quantize int8 -o bundle/
  dsbd-export --bundle bundle/ --draft DRAFT
"""
DISTILL_EXAMPLES = """\b
Examples:
  dsbd-distill --target TARGET --data texts/ -o DRAFT
  dsbd-distill --target TARGET --data texts/ --params 30M --minutes 120 -o DRAFT
"""
RUN_EXAMPLES = """\b
Examples:
  dsbd-run bundle/ --prompt "def read_json(path):" --num-beams 4 --top-k 20
  dsbd-run bundle/ --input prompts.jsonl --output answers.jsonl --concurrency 8
  dsbd-run speech/ --audio a.wav b.mp3 --output-format srt --output-dir subtitles/

Which strategy: dsbd for the best text that is still sampled, speculative for the fastest samples,
speculative-beam-search for the likeliest text; beam-sample, sample, beam-search and greedy give the
same outputs without a draft. docs/settings.md says more.
"""
BENCH_EXAMPLES = """\b
Examples:
  dsbd-bench bundle/ --strategies speculative,dsbd --num-beams 4 --json report.json
  dsbd-bench bundle/ --run "dsbd num_beams=4" --run "beam-search num_beams=4" --plot bench.png
  dsbd-bench bundle/ --check-invariance --repetitions 1 --max-new-tokens 16
"""
INSPECT_EXAMPLES = """\b
Examples:
  dsbd-inspect bundle/
  dsbd-inspect bundle/ --verify --json
"""
SERVE_EXAMPLES = """\b
Examples:
  dsbd-serve bundle/
  dsbd-serve bundle/ --host 0.0.0.0 --port 8080 --api-key-file keys.txt --max-requests 16
"""


def _list_families(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given and not context.resilient_parsing:
        export_command.print_families()
        context.exit()


@command(export_command.ExportArguments, epilog=EXPORT_EXAMPLES)
@click.option(
    "--list-families",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_families,
    help="Print which model families can be exported, and how.",
)
def export(arguments: export_command.ExportArguments) -> None:
    """Turn a target checkpoint, and a draft for it, into a bundle of engines.

    Without a draft model, requests draft by repeating what followed the same words earlier.
    """
    export_command.run(arguments, given_flags(click.get_current_context()))


@command(distill_command.DistillArguments, epilog=DISTILL_EXAMPLES)
def distill(arguments: distill_command.DistillArguments) -> None:
    """Train a draft for a target.

    It learns from your texts and from the target's continuations of them. The same command resumes
    a run that was stopped.
    """
    distill_command.run(arguments)


@command(RunArguments, epilog=RUN_EXAMPLES)
def run(arguments: RunArguments) -> None:
    """Continue a prompt with a bundle.

    The prompt may also be given on stdin; at a terminal prompts are read one after another. A
    speech model transcribes the files of --audio. --help-all shows more options.
    """
    arguments.check(given_flags(click.get_current_context()).values())
    with slow_phases():
        exit_code = run_command.run(arguments)
    sys.exit(exit_code)


@command(bench_command.BenchArguments, epilog=BENCH_EXAMPLES)
def bench(arguments: bench_command.BenchArguments) -> None:
    """Measure strategies side by side: speed, quality, and whether the tokens are the same."""
    with slow_phases():
        bench_command.run(arguments)


@command(
    inspect_command.InspectArguments, epilog=f"{INSPECT_EXAMPLES}\n\n{inspect_command.JSON_FIELDS}"
)
def inspect(arguments: inspect_command.InspectArguments) -> None:
    """Show the contents of a bundle, its memory, and which providers can run it here."""
    with slow_phases():
        inspect_command.run(arguments)


@command(ServeArguments, epilog=SERVE_EXAMPLES)
def serve(arguments: ServeArguments) -> None:
    """Serve a bundle over OpenAI's HTTP interface, many requests at a time, until Ctrl-C."""
    with packages_of("the server", "serve"):
        from dsbd_ort.commands.http_server import serve as serve_until_stopped
    serve_until_stopped(arguments)
