"""Prompts answered one after another: printed, streamed, traced, kept as the history of a chat."""

import sys
from collections.abc import Callable

import click
from rich.console import Console
from rich.table import Table

from dsbd_errors import DsbdError
from dsbd_ort.answers import Answer, answer, watched_signals
from dsbd_ort.commands.run_arguments import RunArguments
from dsbd_ort.decoding import DecodingStats, RequestTrace
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.prompts import Messages, user_messages
from dsbd_ort.results import error_object, json_text, result_object
from dsbd_ort.trace_page.trace_file import write_trace

PROMPT_SIGN = ">>> "
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


class Responder:
    """Answers one prompt after another, and prints the answers: continues every prompt."""

    def __init__(self, pipeline: Pipeline, arguments: RunArguments) -> None:
        self._pipeline = pipeline
        self._arguments = arguments

    def respond(self, text: str, is_interrupted: Callable[[], bool]) -> Answer:
        """Continue ``text`` and print both; with an encoder-decoder the answer alone."""
        reads_source = self._pipeline.prompts.encoder is not None
        return self._answer(text, is_interrupted, heading="" if reads_source else text)

    def _answer(
        self, prompt: str | list[int], is_interrupted: Callable[[], bool], *, heading: str
    ) -> Answer:
        """Answer a prompt and print the answer after ``heading``, the text that it continues."""
        arguments, pipeline = self._arguments, self._pipeline
        trace = RequestTrace() if arguments.trace else None
        unshown = heading  # goes with the first piece, so that nothing is printed for a bad prompt

        def show(piece: str) -> None:
            nonlocal unshown
            if arguments.stream:
                click.echo(unshown + piece, nl=False)
                unshown = ""

        done = answer(pipeline, prompt, arguments.options, is_interrupted, show, trace)
        if arguments.as_json:
            click.echo(_as_json(done))
        elif arguments.stream:
            click.echo(unshown)
        else:
            click.echo(_as_text(done, heading))
        if done.result is not None and not arguments.as_json:
            _print_seed(done.result.seed, pipeline, arguments)
        if arguments.stats and done.stats is not None:
            print_stats(done.stats, "statistics" if done.result else "statistics until interrupted")
        if arguments.trace and trace:
            write_trace(arguments.trace, trace, pipeline.tokenizer)
        return done


class _Chat(Responder):
    def __init__(self, pipeline: Pipeline, arguments: RunArguments) -> None:
        super().__init__(pipeline, arguments)
        self._messages: Messages = []

    def respond(self, text: str, is_interrupted: Callable[[], bool]) -> Answer:
        """Answer ``text``, print the answer; an interrupted one is kept as far as printed."""
        system = None if self._messages else self._arguments.system
        messages = [*self._messages, *user_messages(text, system)]
        prompt = self._pipeline.chat_prompt(
            messages, chat_template_kwargs=self._arguments.chat_template_kwargs
        )
        done = self._answer(prompt, is_interrupted, heading="")
        self._messages = [*messages, {"role": "assistant", "content": done.text}]
        return done


def responder_of(pipeline: Pipeline, arguments: RunArguments) -> Responder:
    """Return a responder that continues text or, with --chat, holds a conversation."""
    return _Chat(pipeline, arguments) if arguments.chat else Responder(pipeline, arguments)


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


def _as_json(answer: Answer) -> str:
    if answer.result is None:
        return json_text({**error_object("interrupted"), "text": answer.text})
    return json_text(result_object(answer.result))


def _print_seed(seed: int, pipeline: Pipeline, arguments: RunArguments) -> None:
    options = arguments.options
    if pipeline.requests.resolve(options).row.rule in ("sample", "joint") and "seed" not in options:
        click.echo(f"seed {seed} (--seed {seed} repeats this answer)", err=True)


def print_stats(stats: DecodingStats, title: str) -> None:
    """Print a row for each of ``SHOWN_STATS``."""
    table = Table(title=title, caption="--json has all of them", show_header=False)
    for name in SHOWN_STATS:
        value = getattr(stats, name)
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console(stderr=True).print(table)
