"""Chat template of a bundle: converts messages to the text that the model was trained on.

Templates are programs of a checkpoint. They run in jinja2's immutable sandbox with
``raise_exception``, ``strftime_now``, a ``tojson`` that escapes no HTML, loop controls and the
``generation`` tag, on which Hugging Face templates rely; Python's internals are out of reach.

The text equals that of transformers' ``apply_chat_template(tokenize=False)``, except that messages
which it would drop silently are refused, and for the changes of ``messages_for``.
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

from dsbd_runtime.bundle_files.bundle import (
    ADDITIONAL_TEMPLATES_FOLDER,
    CHAT_TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
)
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.text.chat_messages import (
    Message,
    check_messages,
    check_traces,
    messages_for,
    with_joined_parts,
)
from dsbd_runtime.typed_json import json_object_in

_DEFAULT, _WITH_TOOLS = _USED_NAMES = ("default", "tool_use")


class ChatTemplate:
    """The compiled templates of a bundle: for conversations without and with tools."""

    def __init__(
        self,
        sources: str | Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile templates.

        sources: by name; only ``default`` and ``tool_use`` are used. A text is the default.
        special_tokens: variables of the templates, ``bos_token`` and so on.
        """
        named = {_DEFAULT: sources} if isinstance(sources, str) else sources
        self._sources = {name: named[name] for name in _USED_NAMES if name in named}
        self._templates = {
            name: _compiled(name, source, now) for name, source in self._sources.items()
        }
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate:
        """Read the template files of a folder or, without any, those in tokenizer_config.json.

        The files are chat_template.jinja and additional_chat_templates/NAME.jinja. The field
        ``chat_template`` of the config is one text, or a list of named ones.
        """
        config = json_object_in(folder / TOKENIZER_CONFIG_FILE)
        sources = _sources_in(folder) or _sources_of(config.get("chat_template"))
        if not sources:
            raise BundleError(
                f"{folder} has no chat template: neither {CHAT_TEMPLATE_FILE} nor a chat_template "
                f"in {TOKENIZER_CONFIG_FILE}; give a plain prompt, or export a chat model"
            )
        return cls(sources, _special_tokens(config))

    def source(self, *, has_tools: bool) -> str:
        """Return the template's source: with tools the one named ``tool_use``, if present."""
        return self._sources[self._name(has_tools)]

    def _name(self, has_tools: bool) -> str:
        name = _WITH_TOOLS if has_tools and _WITH_TOOLS in self._sources else _DEFAULT
        if name not in self._sources:
            raise BundleError(
                f"this bundle has a chat template for conversations with tools only ({_WITH_TOOLS})"
                f"; give tools, or add a default one, {CHAT_TEMPLATE_FILE}, and export again"
            )
        return name

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation, all special tokens spelled out.

        add_generation_prompt: end with the beginning of the model's answer.
        variables: more variables of the template, such as ``tools`` or ``enable_thinking``.
        InputError: the messages are invalid, refused by the template, or one leaves no trace.
        """
        check_messages(messages)
        name = self._name((variables or {}).get("tools") is not None)
        prepared = messages_for(self._sources[name], messages)
        context = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(variables or {}),
            "add_generation_prompt": add_generation_prompt,
        }

        def rendered(conversation: Sequence[Message]) -> str:
            return self._templates[name].render({**context, "messages": conversation})

        ready = with_joined_parts(prepared, rendered)
        try:
            text = rendered(ready)
        except Exception as error:  # a template may raise anything: it is the checkpoint's program
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"the chat template refuses these messages: {reason}; give roles and contents "
                "that the checkpoint's template takes"
            ) from error
        check_traces(ready, text, rendered)
        return text


def _compiled(name: str, source: str, now: Callable[[], datetime]) -> jinja2.Template:
    try:
        return template_sandbox(now).from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise BundleError(
            f"the chat template {name!r} is not a jinja2 template: {error}; fix it in the "
            "checkpoint and export again"
        ) from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return ``bos_token``, ``eos_token``, ... and ``extra_special_tokens``, each a text."""
    tokens: dict[str, str] = {}
    named = config.get("extra_special_tokens")
    named = named if isinstance(named, Mapping) else {}
    for name, value in (*config.items(), *named.items()):
        if name.endswith("_token") or name in named:
            content = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens


def _sources_in(folder: Path) -> dict[str, str]:
    files = {_DEFAULT: folder / CHAT_TEMPLATE_FILE}
    files[_WITH_TOOLS] = folder / ADDITIONAL_TEMPLATES_FOLDER / f"{_WITH_TOOLS}.jinja"
    texts = {name: _text(file) for name, file in files.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _sources_of(entry: object) -> dict[str, str]:
    """Return the templates of a config's ``chat_template`` by name: a text is the default."""
    named: dict[object, object] = {_DEFAULT: entry}
    if isinstance(entry, list):
        named = {each.get("name"): each.get("template") for each in entry if isinstance(each, dict)}
    sources = {name: named.get(name) for name in _USED_NAMES}
    return {name: source for name, source in sources.items() if isinstance(source, str)}


def _text(file: Path) -> str | None:
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
    """``{% generation %}...{% endgeneration %}``, which marks answers; only its body is used."""

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
    """A namespace without underscored names, which would give access to Python's internals."""

    def __init__(*args: Any, **attributes: Any) -> None:  # so that ``namespace(self=1)`` works
        namespace, *rest = args
        given = dict(*rest, **attributes)
        for name in given:
            _check_name(name)
        Namespace.__init__(namespace, given)

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
