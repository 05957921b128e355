"""Lines of a batch: shared settings, prompts parsed from JSON, answers as JSON objects."""

import hashlib
import itertools
import json
import logging
import math
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsbd_errors import DsbdError
from dsbd_errors.text_files import check_utf_8
from dsbd_ort.batch.answers import TextGenerator, answer
from dsbd_ort.decoding.noise import sample_seed
from dsbd_ort.decoding.option_table import IN_PYTHON_ALONE, OPTION_TABLE
from dsbd_ort.decoding.option_values import did_you_mean
from dsbd_ort.pipeline import PipelineSettings
from dsbd_ort.requests.prompts import LANGUAGE_OPTIONS, new_seed, user_messages
from dsbd_ort.requests.results import JSON_VERSION, error_object, result_object
from dsbd_ort.version import __version__
from dsbd_runtime.bundle_files.bundle import MANIFEST_NAME, open_bundle
from dsbd_runtime.errors import InputError
from dsbd_runtime.typed_json import in_short

_log = logging.getLogger(__name__)
_MOST_CHARACTERS = 1000  # longest error message; it may quote the line
MOST_LEVELS = 64
"""Depth of nested lists and objects that parsers, worker processes and templates accept."""
_OPTIONS = frozenset((*OPTION_TABLE, *LANGUAGE_OPTIONS)) - {*IN_PYTHON_ALONE}
_PROMPTS = ("prompt", "ids", "messages")
_OTHERS = frozenset(("id", *_PROMPTS))


class BatchError(DsbdError):
    """Unreadable input, output that cannot be written or resumed, or a worker that ended."""


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """Settings shared by all lines of a batch."""

    pipeline: PipelineSettings
    options: dict[str, Any] = field(default_factory=dict)  # given options; a line overrides them
    is_chat: bool = False  # whether a prompt is a user message for the chat template
    system: str | None = None  # system message before a prompt of a chat; None: no such message
    chat_template_kwargs: dict[str, Any] | None = None  # more variables of the template
    # the batch's seed: if ``options`` have no seed, seeds of lines are derived from it
    seed: int = field(default_factory=new_seed)

    def fingerprint(self) -> str:
        """Return a hash of bundle, options and version, but not workers, threads or random seed."""
        bundle = open_bundle(self.pipeline.bundle)
        manifest = (bundle.path / MANIFEST_NAME).read_bytes()
        parts = [
            __version__,
            hashlib.sha256(manifest).hexdigest(),
            self.pipeline.provider,
            self.pipeline.draft_provider,
            self.pipeline.generation_config,
            self.pipeline.chat_defaults,
            sorted(self.options.items()),
            _trie_digest(self.options),
            self.is_chat,
            self.system,
            self.chat_template_kwargs,
        ]
        return hashlib.sha256(json.dumps(parts, default=repr).encode()).hexdigest()


def _trie_digest(options: dict[str, Any]) -> str | None:
    constraint = options.get("constraint")
    if not isinstance(constraint, dict) or "trie" not in constraint:
        return None
    with Path(constraint["trie"]).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class RawLine:
    """A line of the input."""

    number: int  # counted from 1, including blank lines, which are not requests
    content: bytes

    def request_hash(self, fingerprint: str) -> str:
        parts = f"{fingerprint}\n{self.number}\n".encode() + self.content
        return hashlib.sha256(parts).hexdigest()[:24]

    def seed(self, seed: int) -> int:
        """Return the line's seed, derived from the batch's seed and the line's number."""
        return sample_seed(seed, self.number)


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """A parsed line."""

    prompt: str | None = None  # text to continue; None if there are ids or messages
    ids: list[int] | None = None  # token ids to continue
    messages: list[Any] | None = None  # a conversation for the chat template
    options: dict[str, Any] = field(default_factory=dict)  # options that this line sets


def read_lines(file: Path) -> Iterator[RawLine]:
    """Yield the requests of a JSONL file."""
    try:
        with file.open("rb") as lines:
            check_utf_8(lines.peek(4))
            for number, line in enumerate(lines, start=1):
                content = (line.removeprefix(BOM_UTF8) if number == 1 else line).strip()
                if content:
                    yield RawLine(number, content)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BatchError(f"--input {file} cannot be read: {reason}") from error


def parsed_object(content: bytes) -> dict[str, Any]:
    """Parse the JSON object of a line; ``check_field`` checks its values."""
    try:
        fields = json.loads(content)
    except RecursionError as error:
        raise InputError(
            f"the line is nested deeper than {MOST_LEVELS} levels; expected a flatter value"
        ) from error
    except ValueError as error:
        raise InputError(
            f"the line is invalid JSON ({error}); expected one object per line"
        ) from error
    if not isinstance(fields, dict):
        raise InputError(
            f"the line is a JSON {type(fields).__name__}; expected an object such as "
            '{"prompt": "Hello"}'
        )
    return fields


def check_field(name: str, value: Any) -> None:
    """Refuse a value that JSON cannot express, or that is nested too deeply for some parsers."""
    layer, num_levels = [value], 0
    while layer:
        for entry in layer:
            if isinstance(entry, float) and not math.isfinite(entry):
                raise InputError(
                    f"{name} holds {entry}, which JSON does not have; give a finite number, or a "
                    "text"
                )
        nested = [entry for entry in layer if isinstance(entry, list | dict)]
        num_levels += bool(nested)
        if num_levels > MOST_LEVELS:
            raise InputError(
                f"{name} is nested deeper than {MOST_LEVELS} levels; expected a flatter value"
            )
        children = (entry.values() if isinstance(entry, dict) else entry for entry in nested)
        layer = [*itertools.chain.from_iterable(children)]


def prompt_line(fields: dict[str, Any]) -> PromptLine:
    """Return the request of a line."""
    for name, value in fields.items():
        check_field(in_short(name) if name not in _OPTIONS | _OTHERS else name, value)
    given = [name for name in _PROMPTS if name in fields]
    if len(given) != 1:
        raise InputError(
            f"the line has {' and '.join(given) or 'neither prompt, ids nor messages'}; expected "
            'one of them, as in {"prompt": "Hello"}'
        )
    options = {key: value for key, value in fields.items() if key not in (given[0], "id")}
    if unknown := sorted(set(options) - _OPTIONS):
        close = did_you_mean(unknown[0], _OPTIONS | _OTHERS)
        expected = close or (
            "; expected id, prompt, ids or messages, or a field of DecodingConfig (docs/run.md "
            "lists them)"
        )
        raise InputError(f"the line has {in_short(unknown[0])}{expected}")
    prompt, ids, messages = (fields.get(name) for name in _PROMPTS)
    if given == ["prompt"] and not isinstance(prompt, str):
        raise InputError(f"prompt is {in_short(prompt)}; expected a text")
    if given == ["messages"] and not isinstance(messages, list):
        raise InputError(f"messages is {in_short(messages)}; expected a list of messages")
    if given == ["ids"] and not (isinstance(ids, list) and all(type(each) is int for each in ids)):
        raise InputError(f"ids is {in_short(ids)}; expected a list of token ids")
    return PromptLine(prompt=prompt, ids=ids, messages=messages, options=options)


@dataclass(frozen=True)
class LineAnswer:
    """The answer to a line."""

    fields: dict[str, Any]  # its object in the output
    num_tokens: int  # new tokens of its best sequence
    is_error: bool


def answer_line(
    generator: TextGenerator,
    settings: BatchSettings,
    fingerprint: str,
    line: RawLine,
    is_interrupted: Callable[[], bool],
) -> LineAnswer | None:
    """Answer a line; return None if the work was interrupted."""
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
    except Exception as error:  # a bug that one line triggers must not stop the other lines
        _log.debug("line %d", line.number, exc_info=True)
        message = f"internal error, {type(error).__name__}: {error}"
    fields = {**head, **error_object(message[:_MOST_CHARACTERS])}
    return LineAnswer(fields, num_tokens=0, is_error=True)


def _answered(
    generator: TextGenerator,
    settings: BatchSettings,
    line: RawLine,
    request: PromptLine,
    head: dict[str, Any],
    is_interrupted: Callable[[], bool],
) -> LineAnswer | None:
    options = {**settings.options, **request.options}
    if "seed" not in request.options:
        options["seed"] = line.seed(settings.options.get("seed", settings.seed))
    prompt: str | list[int] = request.prompt or "" if request.ids is None else request.ids
    messages = request.messages
    if request.prompt is not None and settings.is_chat:
        messages = user_messages(request.prompt, settings.system)
    if messages is not None:
        template_kwargs = settings.chat_template_kwargs
        prompt = generator.chat_prompt(messages, chat_template_kwargs=template_kwargs)
    done = answer(generator, prompt, options, is_interrupted)
    if done.result is None:
        return None
    fields = {**head, **result_object(done.result)}
    return LineAnswer(fields, done.result.stats.num_output_tokens, is_error=False)
