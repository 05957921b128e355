"""A bundle's chat template: messages to the text that the model was trained on.

The text equals that of transformers' ``apply_chat_template(tokenize=False)``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from dsbd_runtime.bundle import CHAT_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.template_sandbox import template_sandbox
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
                f"the chat template is no jinja2 template: {error}; mend {CHAT_TEMPLATE_FILE} of "
                "the checkpoint and export again"
            ) from error
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
            add_generation_prompt: end with what begins the model's answer.
            variables: more of what the template reads, such as ``tools`` or ``enable_thinking``.

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
                    "messages": [dict(message) for message in messages],
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # a template may raise anything: it is the checkpoint's program
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"the chat template refuses these messages: {reason}; give roles and contents "
                "that the checkpoint's template takes"
            ) from error


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
    """Return ``bos_token``, ``eos_token``, ...: texts, or objects that hold one as content."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        if name.endswith("_token"):
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
