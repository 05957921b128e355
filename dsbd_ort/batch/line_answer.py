"""Answer one line: the object that stands for it in the output, whatever happened."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsbd_errors import DsbdError
from dsbd_ort.answer import TextGenerator, answer
from dsbd_ort.batch.prompt_line import (
    PromptLine,
    RawLine,
    check_field,
    parsed_object,
    prompt_line,
)
from dsbd_ort.batch.settings import BatchSettings
from dsbd_ort.conversation import user_messages
from dsbd_ort.json_output import JSON_VERSION, error_object, result_object

_log = logging.getLogger(__name__)
_MOST_CHARACTERS = 1000  # of an error, which may quote the line


@dataclass(frozen=True)
class LineAnswer:
    """What became of a line.

    Attributes:
        fields: its object in the output.
        num_tokens: new tokens of its best sequence.
        is_error: whether the object tells an error.
    """

    fields: dict[str, Any]
    num_tokens: int
    is_error: bool


def answer_line(
    generator: TextGenerator,
    settings: BatchSettings,
    fingerprint: str,
    line: RawLine,
    is_interrupted: Callable[[], bool],
) -> LineAnswer | None:
    """Answer a line; return None where the work was interrupted."""
    head = {
        "version": JSON_VERSION,
        "line": line.number,
        "request": line.request_hash(fingerprint),
    }
    try:
        fields = parsed_object(line.content)
        if "id" in fields:
            check_field("id", fields["id"])
            head["id"] = fields["id"]
        return _answered(generator, settings, line, prompt_line(fields), head, is_interrupted)
    except DsbdError as error:
        message = str(error)
    except Exception as error:  # a bug that one line meets must not cost the others
        _log.debug("line %d", line.number, exc_info=True)
        message = f"internal error, {type(error).__name__}: {error}"
    fields = {**head, **error_object(message[:_MOST_CHARACTERS])}
    return LineAnswer(fields, num_tokens=0, is_error=True)


def _answered(
    generator: TextGenerator,
    settings: BatchSettings,
    line: RawLine,
    asked: PromptLine,
    head: dict[str, Any],
    is_interrupted: Callable[[], bool],
) -> LineAnswer | None:
    options = {**settings.options, **asked.options}
    if "seed" not in asked.options:
        options["seed"] = line.seed(settings.options.get("seed", 0))
    prompt: str | list[int]
    if asked.messages is not None:
        prompt = generator.chat_prompt(asked.messages)
    elif settings.is_chat:
        prompt = generator.chat_prompt(user_messages(asked.prompt or "", settings.system))
    else:
        prompt = asked.prompt or ""
    given = answer(generator, prompt, options, is_interrupted)
    if given.result is None:
        return None
    fields = {**head, "seed": options["seed"], **result_object(given.result)}
    return LineAnswer(fields, given.result.stats.num_output_tokens, is_error=False)
