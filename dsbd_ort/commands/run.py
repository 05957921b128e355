"""dsbd-run: one prompt, a terminal session, a batch of prompts in a file, or audio files."""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import click
from rich.console import Console

from dsbd_errors import DsbdError
from dsbd_ort.batch.answer_sources import AnswerSource, SharedCalls, Workers, one_after_another
from dsbd_ort.batch.answers import Answer, answer, watched_signals
from dsbd_ort.batch.job import Batch, run_batch
from dsbd_ort.batch.prompt_lines import BatchError, BatchSettings
from dsbd_ort.commands.one_line import packages_of
from dsbd_ort.commands.run_arguments import STANDARD_STREAM, RunArguments
from dsbd_ort.commands.transcription import print_stats, run_audio
from dsbd_ort.decoding import RequestTrace
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.requests.prompts import user_messages
from dsbd_ort.requests.results import error_object, json_text, result_object
from dsbd_ort.trace_page.trace_file import check_trace_path, write_trace
from dsbd_runtime.text.chat_messages import Message

ANSWERS_FILE = "answers.jsonl"


def run(arguments: RunArguments) -> int:
    """Answer one prompt, a terminal's or a file's prompts, or transcribe; return the exit code."""
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
        responder = responder_of(pipeline, arguments)
        if isinstance(responder, _Pictures):  # pictures need no text
            responder.respond("", lambda: False)
        else:
            talk(responder.respond, line_of_terminal)
    return 0


@contextlib.contextmanager
def _input_file(given: Path) -> Iterator[Path]:
    """Yield the file of --input. Stdin is copied to a file first: a batch reads its input twice."""
    if given != STANDARD_STREAM:
        yield given
        return
    if sys.stdin is None:
        raise click.UsageError("--input is - (stdin), which is closed; give a file")
    with tempfile.NamedTemporaryFile(prefix="dsbd-run-stdin-", suffix=".jsonl") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        yield Path(file.name)


def _answer_one(arguments: RunArguments, prompt: str | list[int]) -> int:
    arguments = replace(arguments, stream=arguments.streams_text)
    with arguments.opening.open() as pipeline:
        responder = responder_of(pipeline, arguments)
        with watched_signals() as interruption:
            if isinstance(prompt, str):
                responder.respond(prompt, interruption.is_requested)
            else:
                responder.continue_ids(prompt, interruption.is_requested)
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


PROMPT_SIGN = ">>> "


class Responder:
    """Answers prompts one after another by continuing them, and prints the answers."""

    def __init__(self, pipeline: Pipeline, arguments: RunArguments) -> None:
        self._pipeline = pipeline
        self._arguments = arguments

    def respond(self, text: str, is_interrupted: Callable[[], bool]) -> Answer:
        """Continue ``text`` and print both; with an encoder-decoder print only the answer."""
        reads_source = self._pipeline.prompts.encoder is not None
        return self._answer(text, is_interrupted, heading="" if reads_source else text)

    def continue_ids(self, ids: list[int], is_interrupted: Callable[[], bool]) -> Answer:
        """Continue token ids and print the new ones."""
        return self._answer(ids, is_interrupted, heading="", shown=_as_ids)

    def _answer(
        self,
        prompt: str | list[int],
        is_interrupted: Callable[[], bool],
        *,
        heading: str,
        shown: Callable[[Answer, str], str] | None = None,
    ) -> Answer:
        """Answer a prompt and print the answer after ``heading``, the text that it continues."""
        arguments, pipeline = self._arguments, self._pipeline
        trace = RequestTrace() if arguments.trace else None
        unshown = heading  # printed with the first piece: nothing is printed for an invalid prompt

        def show(piece: str) -> None:
            nonlocal unshown
            if arguments.stream:
                click.echo(unshown + piece, nl=False)
                unshown = ""

        done = answer(pipeline, prompt, arguments.options, is_interrupted, show, trace)
        if arguments.stream:
            click.echo(unshown)
        elif not arguments.as_json:
            click.echo((shown or _as_text)(done, heading))
        self._print_rest(done)
        if arguments.trace and trace:
            write_trace(arguments.trace, trace, pipeline.tokenizer)
        return done

    def _print_rest(self, done: Answer, file: Path | None = None) -> None:
        """Print an answer as JSON or its seed, and statistics; ``file``: picture, if several."""
        arguments, named = self._arguments, {} if file is None else {"image": str(file)}
        if arguments.as_json:
            click.echo(json_text({**named, **_object_of(done)}))
        elif done.result is not None:
            _print_seed(done.result.seed, self._pipeline, arguments)
        if arguments.stats and done.stats is not None:
            title = "statistics" if done.result else "statistics until interrupted"
            print_stats(done.stats, title if file is None else f"{title} of {file.name}")


class _Chat(Responder):
    def __init__(self, pipeline: Pipeline, arguments: RunArguments) -> None:
        super().__init__(pipeline, arguments)
        self._messages: list[Message] = []

    def respond(self, text: str, is_interrupted: Callable[[], bool]) -> Answer:
        """Answer ``text`` and print the answer; keep an interrupted answer as far as it got."""
        begins, arguments = not self._messages, self._arguments
        messages = [*self._messages, *user_messages(text, arguments.system if begins else None)]
        if begins and arguments.image:
            messages[-1] = _about_pictures(arguments.image_files, text)
        prompt = self._pipeline.chat_prompt(
            messages, chat_template_kwargs=arguments.chat_template_kwargs
        )
        done = self._answer(prompt, is_interrupted, heading="")
        self._messages = [*messages, {"role": "assistant", "content": done.text}]
        return done


class _Pictures(Responder):
    """Answers pictures with an encoder-decoder; several pictures are computed together."""

    def respond(self, text: str, is_interrupted: Callable[[], bool]) -> Answer:
        """Answer the pictures of --image; ``text``: beginning of each answer, such as a task."""
        arguments, pipeline = self._arguments, self._pipeline
        prompts = [[_about_pictures([file], text)] for file in arguments.image_files]
        if len(prompts) == 1:
            return self._answer(pipeline.chat_prompt(prompts[0]), is_interrupted, heading="")
        if arguments.trace:
            raise click.UsageError(f"--trace {arguments.trace} draws one request; give one --image")
        results = pipeline.generate(cast("Any", prompts), **arguments.options)
        for file, result in zip(arguments.image_files, results, strict=True):
            done = Answer(result.sequences[0].text, result, result.stats)
            if not arguments.as_json:
                click.echo(f"{file}:\n{_as_text(done, '')}")
            self._print_rest(done, file)
        return done


def _about_pictures(files: Iterable[Path], text: str) -> Message:
    """Return the user's message with pictures and, unless it is empty, a text."""
    parts: list[Message] = [{"type": "image", "image": file} for file in files]
    return {"role": "user", "content": parts + [{"type": "text", "text": text}] * bool(text)}


def responder_of(pipeline: Pipeline, arguments: RunArguments) -> Responder:
    """Return a responder that continues text or, with --chat or --image, holds a conversation."""
    if arguments.image and pipeline.prompts.encoder is not None:
        return _Pictures(pipeline, arguments)
    return _Chat(pipeline, arguments) if arguments.is_chat else Responder(pipeline, arguments)


def talk(
    respond: Callable[[str, Callable[[], bool]], Answer], read_line: Callable[[], str]
) -> None:
    """Read and answer lines until the end of input: Ctrl-C ends an answer, Ctrl-D the session."""
    while True:
        try:
            text = read_line()
        except EOFError:
            click.echo(err=True)
            return
        except KeyboardInterrupt:
            click.echo(err=True)
            continue
        if not text.strip():
            continue
        with watched_signals() as interruption:
            try:
                respond(text, interruption.is_requested)
            except DsbdError as error:
                click.echo(f"Error: {error}", err=True)
        if interruption.is_termination:
            raise SystemExit(interruption.exit_code)


def line_of_terminal() -> str:
    """Read one line from the terminal, with line editing and history if available."""
    try:
        import readline  # noqa: F401 - input() uses it; it prints to a terminal only
    except ImportError:
        pass
    if sys.stdout.isatty():
        return input(PROMPT_SIGN)
    click.echo(PROMPT_SIGN, nl=False, err=True)  # stdout is a file, for answers only
    return input()


def _as_text(answer: Answer, heading: str) -> str:
    if answer.result is None:
        return heading + answer.text
    sequences = answer.result.sequences
    if any(sequence.items for sequence in sequences):
        return "\n".join(
            "\t".join([f"{sequence.score:.4f}", *map(json_text, sequence.items or [])])
            for sequence in sequences
        )
    return "\n\n".join(heading + sequence.text for sequence in sequences)


def _as_ids(answer: Answer, heading: str) -> str:
    """Return the token ids of an answer, one sequence per line; its text if it was interrupted."""
    sequences = answer.result.sequences if answer.result is not None else []
    lines = [",".join(map(str, sequence.token_ids)) for sequence in sequences]
    return "\n".join(lines) or answer.text


def _object_of(answer: Answer) -> dict[str, Any]:
    if answer.result is None:
        return {**error_object("interrupted"), "text": answer.text}
    return result_object(answer.result)


def _print_seed(seed: int, pipeline: Pipeline, arguments: RunArguments) -> None:
    options = arguments.options
    if pipeline.resolve(options).row.rule in ("sample", "joint") and "seed" not in options:
        click.echo(f"seed {seed} (--seed {seed} repeats this answer)", err=True)
