"""Chat template of a bundle: messages to the text that the model was trained on.

Templates are programs that belong to a checkpoint. They run in jinja2's immutable sandbox with
``raise_exception``, ``strftime_now``, a ``tojson`` that escapes no HTML, loop controls and the
``generation`` tag, on which Hugging Face templates rely; Python's internals are out of reach.

The text equals that of transformers' ``apply_chat_template(tokenize=False)``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from dsbd_runtime.bundle import CHAT_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.typed_json import in_short

Message = Mapping[str, Any]


class ChatTemplate:
    """The template of a bundle, compiled."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile ``source``; ``special_tokens`` are its variables ``bos_token`` and so on."""
        try:
            self._template = template_sandbox(now).from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise BundleError(
                f"the chat template is no jinja2 template: {error}; fix {CHAT_TEMPLATE_FILE} of "
                "the checkpoint and export again"
            ) from error
        self.source = source
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate:
        """Read chat_template.jinja, or else tokenizer_config.json's ``chat_template``."""
        config = _json_object(folder / TOKENIZER_CONFIG_FILE)
        source = _text(folder / CHAT_TEMPLATE_FILE)
        if source is None:
            source = _template_of(config.get("chat_template"))
        if source is None:
            raise BundleError(
                f"{folder} has no chat template: neither {CHAT_TEMPLATE_FILE} nor a chat_template "
                f"in {TOKENIZER_CONFIG_FILE}; give a plain prompt, or export a chat model"
            )
        return cls(source, _special_tokens(config))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation, all special tokens spelled out.

        Args:
            messages: each with "role" and "content", oldest first.
            add_generation_prompt: end with the beginning of the model's answer.
            variables: more variables of the template, such as ``tools`` or ``enable_thinking``.

        Raises:
            InputError: the messages are none, or the template refuses them.
        """
        _check_messages(messages)
        try:
            return self._template.render(
                **{
                    "tools": None,
                    "documents": None,
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": [_without_nulls(message) for message in messages],
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # a template may raise anything: it is the checkpoint's program
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"the chat template refuses these messages: {reason}; give roles and contents "
                "that the checkpoint's template takes"
            ) from error


def _without_nulls(message: Message) -> dict[str, Any]:
    """Return a message without the fields that are null, such as the content beside a call."""
    return {name: value for name, value in message.items() if value is not None}


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InputError(
            f"messages is {in_short(messages)}; expected a list such as "
            '[{"role": "user", "content": "Hello"}]'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(
                f"messages[{index}] is {in_short(message)}; expected an object with a text as "
                'its role, such as {"role": "user", "content": "Hello"}'
            )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return ``bos_token``, ``eos_token``, ...: texts, or objects that hold one as content.

    Tokens with other names stand in ``extra_special_tokens``.
    """
    tokens: dict[str, str] = {}
    named = config.get("extra_special_tokens")
    named = named if isinstance(named, Mapping) else {}
    for name, value in (*config.items(), *named.items()):
        if name.endswith("_token") or name in named:
            content = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens


def _template_of(entry: object) -> str | None:
    """Return the template of a config's ``chat_template``: a text, or the "default" of a list."""
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None


def _json_object(file: Path) -> dict[str, Any]:
    text = _text(file)
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file} cannot be read as JSON ({error}); export again") from error
    return config if isinstance(config, dict) else {}


def _text(file: Path) -> str | None:
    """Return the text of a file, None where there is none."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BundleError(f"{file} cannot be read as UTF-8 text ({error}); export again") from error


def template_sandbox(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """Return the environment; ``now`` is the clock of ``strftime_now``."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    environment.globals["dict"] = _PlainDict()
    environment.globals["namespace"] = _PlainNamespace
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks the model's answers; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return the body, which has its own variables as in transformers."""
        line_number = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line_number)


class _PlainDict:
    """``dict`` without the other attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _PlainNamespace(Namespace):
    """A namespace that keeps no underscored names, the way to Python's internals."""

    def __init__(*args: Any, **attributes: Any) -> None:  # so that ``namespace(self=1)`` works
        own, *rest = args
        given = dict(*rest, **attributes)
        for name in given:
            _check_name(name)
        Namespace.__init__(own, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
