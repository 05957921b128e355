"""Where the answers of a batch come from: this process, several processes, or a cluster."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Protocol

from dsbd_ort.batch.line_answer import LineAnswer, answer_line
from dsbd_ort.batch.prompt_line import RawLine
from dsbd_ort.batch.settings import BatchSettings


class AnswerSource(Protocol):
    """Answers lines; who asks closes the iterator, which ends whatever works for it."""

    def answers(
        self,
        settings: BatchSettings,
        fingerprint: str,
        lines: Iterator[RawLine],
        is_interrupted: Callable[[], bool],
    ) -> Generator[LineAnswer, None, None]:
        """Yield the answers in the order of ``lines``; end early where that is wanted."""


class ThisProcess:
    """Answers one line after another, by one pipeline."""

    def answers(
        self,
        settings: BatchSettings,
        fingerprint: str,
        lines: Iterator[RawLine],
        is_interrupted: Callable[[], bool],
    ) -> Generator[LineAnswer, None, None]:
        """See AnswerSource."""
        with settings.pipeline.open() as pipeline:
            for line in lines:
                answer = answer_line(pipeline, settings, fingerprint, line, is_interrupted)
                if answer is None:
                    return
                yield answer
                if is_interrupted():
                    return
