"""dsbd-run --audio: files transcribed one after another, or several that share the engine calls."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDoneError
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from dsbd_errors import DsbdError
from dsbd_ort.audio.audio_files import SAMPLING_RATE, read_audio
from dsbd_ort.batch.answers import Interruption, watched_signals
from dsbd_ort.commands.run_arguments import STANDARD_STREAM, RunArguments
from dsbd_ort.decoding import DecodingStats
from dsbd_ort.engine import Service, ServiceLimits
from dsbd_ort.output_files import write_whole
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.requests.results import json_text
from dsbd_ort.speech.formats import FORMATS, as_text, remarks, transcript_object
from dsbd_ort.speech.transcript import Segment, Transcript
from dsbd_runtime.errors import InputError

SHOWN_STATS = (
    "num_output_tokens",
    "num_iterations",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "target_calls",
    "time_to_first_token_s",
    "tokens_per_s",
    "kv_bytes_peak",
)
"""Statistics of ``--stats``; the others are for tools, which read ``--json``."""
_POLL_SECONDS = 0.2  # a signal is handled within this time


class _Interrupted(Exception):
    """A signal arrived between two windows."""


_Done = tuple[Path, Transcript | DsbdError]
"""A file, and its transcript or the error."""


def run_audio(arguments: RunArguments) -> int:
    """Transcribe the files of the arguments, write their transcripts; return the exit code."""
    _output_files(arguments.audio_files, arguments)  # before opening the bundle, which is slow
    with arguments.opening.open() as pipeline:
        return transcribe_files(pipeline, arguments)


def transcribe_files(pipeline: Pipeline, arguments: RunArguments) -> int:
    """See ``run_audio``; uses an open pipeline."""
    files = arguments.audio_files
    output_files = _output_files(files, arguments)
    if not pipeline.transcribes:
        raise InputError(
            f"--audio is given, but the model of {pipeline.bundle.path} reads text; use a bundle "
            "of a speech model (docs/speech.md), or give --prompt"
        )
    with watched_signals() as interruption:
        with _Shown(arguments, output_files) as shown:
            try:
                for file, transcript in _transcribed(
                    pipeline, files, arguments, interruption, shown
                ):
                    shown.write(file, transcript)
            except _Interrupted:
                click.echo("interrupted", err=True)
        return interruption.exit_code or (2 if shown.num_errors else 0)


def _output_files(files: Sequence[Path], arguments: RunArguments) -> dict[Path, Path]:
    """Return the transcript's file for each audio, {} for stdout; refuse equal file names."""
    num_texts = arguments.options.get("num_return_sequences", 1)
    arguments.speech.check(len(files), num_texts)
    if twice := [file for file, number in Counter(files).items() if number > 1]:
        raise click.UsageError(f"--audio {twice[0]} is given twice; leave one of them out")
    folder = arguments.speech.output_dir
    if folder is None:
        return {}
    ending = arguments.speech.output_format
    names = {
        file: f"{'stdin' if file == STANDARD_STREAM else file.stem}.{ending}" for file in files
    }
    if same := [name for name, number in Counter(names.values()).items() if number > 1]:
        others = ", ".join(str(file) for file, name in names.items() if name == same[0])
        raise click.UsageError(
            f"--output-dir {folder} would have one {same[0]} of {others}; give each a folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return {file: folder / name for file, name in names.items()}


def _transcribed(
    pipeline: Pipeline,
    files: Sequence[Path],
    arguments: RunArguments,
    interruption: Interruption,
    shown: _Shown,
) -> Iterator[_Done]:
    def transcribed(transcriber: Pipeline | Service, file: Path) -> _Done:
        if interruption.is_requested():
            raise _Interrupted
        try:
            samples = read_audio(_source_of(file), SAMPLING_RATE)
            options = arguments.speech.options(arguments.options)
            with shown.progress_of(file, len(samples) / SAMPLING_RATE) as advance:

                def on_segment(segment: Segment) -> None:
                    if interruption.is_requested():
                        raise _Interrupted
                    advance(segment)

                return file, transcriber.transcribe(samples, on_segment=on_segment, **options)
        except DsbdError as error:
            if len(files) == 1:
                raise
            return file, error

    num_threads = min(arguments.concurrency or 1, len(files))
    if num_threads == 1:
        for file in files:
            yield transcribed(pipeline, file)
        return
    limits = ServiceLimits(max_requests=num_threads, max_queued=num_threads)
    with Service(pipeline, limits) as service, ThreadPoolExecutor(num_threads) as threads:
        futures = [threads.submit(transcribed, service, file) for file in files]
        try:
            for future in futures:
                yield _result(future)
        finally:
            for future in futures:
                future.cancel()


def _result(future: Future[_Done]) -> _Done:
    """Return a result; waits in short steps, so that this thread can handle signals."""
    while True:
        with contextlib.suppress(NotDoneError):
            return future.result(_POLL_SECONDS)


def _source_of(file: Path) -> Any:
    if file != STANDARD_STREAM:
        return file
    if sys.stdin is None:
        raise InputError("--audio is - (stdin), which is closed; give a file")
    return sys.stdin.buffer


class _Shown:
    def __init__(self, arguments: RunArguments, output_files: dict[Path, Path]) -> None:
        self._arguments = arguments
        self._files = output_files
        self._is_streamed = arguments.streams_text
        self._begun = False
        self.num_errors = 0
        console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=console,
            # streamed text would write to the same terminal
            disable=not console.is_terminal or (self._is_streamed and sys.stdout.isatty()),
        )

    def __enter__(self) -> _Shown:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
        if self._begun:
            click.echo()

    @contextlib.contextmanager
    def progress_of(self, file: Path, seconds: float) -> Iterator[Callable[[Segment], None]]:
        """Yield a function to call with every segment of a file that lasts ``seconds``."""
        task = self._bars.add_task(file.name, total=seconds)

        def advance(segment: Segment) -> None:
            self._bars.update(task, completed=segment.end)
            if self._is_streamed:
                click.echo(segment.text if self._begun else segment.text.lstrip(), nl=False)
                self._begun = True

        try:
            yield advance
        finally:
            self._bars.remove_task(task)

    def write(self, file: Path, transcript: Transcript | DsbdError) -> None:
        if isinstance(transcript, DsbdError):
            self.num_errors += 1
            message = " ".join(str(transcript).split())
            click.echo(
                f"Error: {message if str(file) in message else f'{file}: {message}'}",
                err=True,
            )
            return
        output = self._files.get(file)
        if output is not None:
            content = self._content(file, transcript)
            write_whole(output, content if content.endswith("\n") else f"{content}\n")
            click.echo(f"{file}: {output}", err=True)
        elif not self._is_streamed:
            heading = f"{file}:\n" * (len(self._arguments.audio_files) > 1)
            is_json = self._arguments.speech.output_format == "json"
            content = self._content(file, transcript)
            click.echo("" if is_json else heading, nl=False)
            click.echo(content, nl=not content.endswith("\n"))
        if self._begun:
            click.echo()
            self._begun = False
        for remark in remarks(transcript):
            click.echo(f"{file}: {remark}", err=True)
        if self._arguments.stats:
            print_stats(transcript.stats, f"statistics of {file.name}")

    def _content(self, file: Path, transcript: Transcript) -> str:
        kind = self._arguments.speech.output_format
        if kind == "json":
            return json_text(transcript_object(transcript, str(file)))
        if kind == "txt" and self._arguments.speech.timestamps:
            return "\n".join(_timed_lines(transcript))
        return as_text(transcript) if kind == "txt" else FORMATS[kind](transcript)


def _timed_lines(transcript: Transcript) -> Iterator[str]:
    for segment in transcript.segments:
        if segment.words is None:
            yield _timed(segment.start, segment.end, segment.text)
        else:
            yield from (_timed(word.start, word.end, word.word) for word in segment.words)


def _timed(start: float, end: float, text: str) -> str:
    return f"[{start:.2f} --> {end:.2f}] {text.strip()}"


def print_stats(stats: DecodingStats, title: str) -> None:
    """Print a row for each of ``SHOWN_STATS``."""
    table = Table(title=title, caption="--json has all of them", show_header=False)
    for name in SHOWN_STATS:
        value = getattr(stats, name)
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console(stderr=True).print(table)
