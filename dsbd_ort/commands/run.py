"""dsbd-run: one prompt, a terminal session, a batch of prompts in a file, or audio files."""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from dsbd_ort.answers import watched_signals
from dsbd_ort.batch.answer_sources import AnswerSource, SharedCalls, Workers, one_after_another
from dsbd_ort.batch.job import Batch, run_batch
from dsbd_ort.batch.prompt_lines import BatchError, BatchSettings
from dsbd_ort.commands.one_line import packages_of
from dsbd_ort.commands.prompt_session import line_of_terminal, responder_of, talk
from dsbd_ort.commands.run_arguments import STANDARD_STREAM, RunArguments
from dsbd_ort.commands.transcription import run_audio
from dsbd_ort.trace_page.trace_file import check_trace_path

ANSWERS_FILE = "answers.jsonl"


def run(arguments: RunArguments) -> int:
    """Answer one prompt, those of a terminal or of a file, or transcribe; return the exit code."""
    if arguments.audio:
        return run_audio(arguments)
    trace = arguments.trace
    if trace is not None:
        check_trace_path(trace)
    if arguments.input is not None and arguments.output is not None:
        console = Console(stderr=True)
        with _input_file(arguments.input) as input:
            return run_batch(_batch(arguments, input, arguments.output, console), console)
    prompt = arguments.read_prompt()
    if prompt is not None:
        return _answer_one(arguments, prompt)
    if trace is not None:
        raise click.UsageError(
            f"--trace {trace} draws one request; give its prompt with --prompt, --prompt-file or "
            "on stdin"
        )
    arguments = replace(arguments, stream=arguments.can_stream)
    with arguments.opening.open() as pipeline:
        talk(responder_of(pipeline, arguments).respond, line_of_terminal)
    return 0


@contextlib.contextmanager
def _input_file(given: Path) -> Iterator[Path]:
    """Hold the file of --input; stdin is read to its end first: a batch reads its input twice."""
    if given != STANDARD_STREAM:
        yield given
        return
    if sys.stdin is None:
        raise click.UsageError("--input is - (stdin), which is closed; give a file")
    with tempfile.NamedTemporaryFile(prefix="dsbd-run-stdin-", suffix=".jsonl") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        yield Path(file.name)


def _answer_one(arguments: RunArguments, prompt: str) -> int:
    arguments = replace(arguments, stream=arguments.streams_text)
    with arguments.opening.open() as pipeline:
        responder = responder_of(pipeline, arguments)
        with watched_signals() as interruption:
            responder.respond(prompt, interruption.is_requested)
        return interruption.exit_code


def _batch(arguments: RunArguments, input: Path, output: Path, console: Console) -> Batch:
    """Return the batch; with a cluster ``output`` is a folder, created if missing."""
    settings = BatchSettings(
        pipeline=arguments.opening,
        options=arguments.options,
        is_chat=arguments.chat,
        system=arguments.system,
        chat_template_kwargs=arguments.chat_template_kwargs,
    )
    source: AnswerSource
    if arguments.cluster is None:
        num_requests, num_workers = arguments.concurrency or 1, arguments.workers or 1
        source = Workers(num_workers) if num_workers > 1 else one_after_another
        source = SharedCalls(num_requests) if num_requests > 1 else source
    else:
        source = _replicas(arguments.cluster, arguments.replicas or 1, console)
        output = _file_in(output)
    return Batch(input=input, output=output, settings=settings, source=source)


def _replicas(cluster: str, num_replicas: int, console: Console) -> AnswerSource:
    with packages_of("--cluster", "cluster"):
        from dsbd_ort.cluster.actor_pool import Replicas

    def report(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    return Replicas(address=cluster, num_replicas=num_replicas, report=report)


def _file_in(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BatchError(
            f"--output {folder} cannot be created ({error.strerror}); with --cluster it is a "
            f"folder, which gets {ANSWERS_FILE}"
        ) from error
    return folder / ANSWERS_FILE
