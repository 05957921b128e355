"""Print the answer to one prompt: text as it comes or in the end, or one JSON object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import click

from dsbd_ort.answer import Answer
from dsbd_ort.commands.stats_table import print_stats
from dsbd_ort.json_output import error_object, json_text, result_object


@dataclass(frozen=True, kw_only=True)
class OutputStyle:
    """What to print.

    Attributes:
        stream: text as soon as it is certain.
        as_json: one object instead of text.
        stats: the statistics as well, on stderr.
    """

    stream: bool = False
    as_json: bool = False
    stats: bool = False


def print_answer(
    ask: Callable[[Callable[[str], None]], Answer], style: OutputStyle, *, heading: str
) -> Answer:
    """Ask, and print what comes.

    Args:
        ask: takes what shows a piece of text, returns the answer.
        style: what to print.
        heading: the text that the answer continues; empty in a chat.
    """
    streamed = _StreamedText(heading)
    answer = ask(streamed.show if style.stream else lambda _: None)
    if style.as_json:
        click.echo(_as_json(answer))
    elif style.stream:
        streamed.finish()
    else:
        click.echo(_as_text(answer, heading))
    if style.stats and answer.result is not None:
        print_stats(answer.result.stats)
    return answer


class _StreamedText:
    """Prints the heading with the first piece, so that a refused prompt prints nothing."""

    def __init__(self, heading: str) -> None:
        self._heading = heading

    def show(self, piece: str) -> None:
        click.echo(self._heading + piece, nl=False)
        self._heading = ""

    def finish(self) -> None:
        click.echo(self._heading)


def _as_text(answer: Answer, heading: str) -> str:
    if answer.result is None:
        return heading + answer.text
    return "\n\n".join(heading + sequence.text for sequence in answer.result.sequences)


def _as_json(answer: Answer) -> str:
    if answer.result is None:
        return json_text({**error_object("interrupted"), "text": answer.text})
    return json_text(result_object(answer.result))
