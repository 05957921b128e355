"""A batch from top to bottom: what is done already, what is left, one line after another."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from rich.console import Console

from dsbd_ort.batch.answer_source import AnswerSource, ThisProcess
from dsbd_ort.batch.errors import BatchError
from dsbd_ort.batch.journal import open_journal
from dsbd_ort.batch.line_answer import LineAnswer
from dsbd_ort.batch.progress import BatchProgress
from dsbd_ort.batch.prompt_line import RawLine, read_lines
from dsbd_ort.batch.settings import BatchSettings
from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.interruption import Interruption, watched_signals


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What is to be done.

    Attributes:
        input, output: JSONL files.
        settings: what all lines have in common.
        source: who answers.
    """

    input: Path
    output: Path
    settings: BatchSettings
    source: AnswerSource = field(default_factory=ThisProcess)


def run_batch(batch: Batch, console: Console) -> int:
    """Answer every line of the input that the output does not answer yet; return the exit code.

    Raises:
        BatchError: the files do not fit each other or cannot be used, or a worker ended.
        DsbdError: the bundle cannot be opened, or no line could take the options.
    """
    _check(batch)
    fingerprint = batch.settings.fingerprint()
    num_lines = sum(1 for _ in read_lines(batch.input))
    with open_journal(batch.output) as journal, watched_signals() as interruption:
        hashes = (line.request_hash(fingerprint) for line in read_lines(batch.input))
        num_done = journal.resume(hashes)
        with BatchProgress(num_lines, num_done, console) as progress:
            left = islice(read_lines(batch.input), num_done, None)
            with closing(_answers(batch, fingerprint, left, interruption)) as answers:
                for answer in answers:
                    journal.append(answer.fields)
                    progress.add(answer)
        console.print(progress.summary(), highlight=False, soft_wrap=True)
        if interruption.is_wanted():
            console.print("interrupted; run the same command again to go on", soft_wrap=True)
        return interruption.exit_code


def _answers(
    batch: Batch, fingerprint: str, lines: Iterator[RawLine], interruption: Interruption
) -> Generator[LineAnswer, None, None]:
    """Yield the answers in order, none after an interruption."""
    first = next(lines, None)
    if first is None:  # nothing is left: open no engine
        return
    lines = chain([first], lines)
    yield from batch.source.answers(batch.settings, fingerprint, lines, interruption.is_wanted)


def _check(batch: Batch) -> None:
    DecodingConfig.from_options(batch.settings.options)
    if batch.output.exists() and batch.input.exists() and batch.output.samefile(batch.input):
        raise BatchError(f"--input and --output are both {batch.input}; give another --output")
