"""Request fields of OpenAI's and vLLM's clients that have no effect here.

A field is accepted if its value would change nothing, and otherwise refused with the reason; no
field is ignored silently. The table of docs/serving_reference.md has these fields and the fields
that the bodies declare. Options have their own names.
"""

import json
from dataclasses import dataclass
from typing import Any

from dsbd_ort.openai_server.errors import ErrorResponse, bad_request

_LATER = "not built yet"


@dataclass(frozen=True)
class Unused:
    """A field that cannot change an answer, for any value of its type."""

    meaning: str
    kind: type = str


@dataclass(frozen=True)
class Refused:
    """A field that is refused unless its value is null or in ``neutral``, which change nothing."""

    reason: str
    neutral: tuple[Any, ...] = ()


RequestField = Unused | Refused

FIELDS: dict[str, RequestField] = {
    "user": Unused("name of the end user"),
    "safety_identifier": Unused("name of the end user"),
    "prompt_cache_key": Unused("prompts that begin alike share their cache rows anyway"),
    "request_id": Unused("name of the request"),
    "metadata": Unused("of stored answers; none is stored", dict),
    "client_metadata": Unused("of the client's own", dict),
    "bad_words": Refused(_LATER, ([],)),
    "allowed_token_ids": Refused(_LATER),
    "guided_decoding_backend": Refused("only one backend is supported"),
    "guided_whitespace_pattern": Refused("use `structured_outputs.disable_any_whitespace`"),
    "functions": Refused("use `tools`", ([],)),
    "function_call": Refused("use `tool_choice`", ("none", "auto")),
    "include_stop_str_in_output": Refused("a text ends before its stop text", (False,)),
    "spaces_between_special_tokens": Refused("the tokenizer decides it", (True,)),
    "truncate_prompt_tokens": Refused("a prompt is never cut silently"),
    "prompt_logprobs": Refused("use `echo` with `logprobs`", (0, False)),
    "continue_final_message": Refused("the template ends every message", (False,)),
    "chat_template": Refused("a template is a program; only the bundle's own is run"),
    "documents": Refused("the bundle's chat template gets messages only", ([],)),
    "priority": Refused("requests are served in the order of their arrival", (0,)),
    "return_tokens_as_token_ids": Refused("tokens are returned as texts", (False,)),
    "reasoning_effort": Refused("the model has only one level", ("none",)),
    "verbosity": Refused("the model has only one level", ("medium",)),
    "modalities": Refused("answers are texts", (["text"],)),
    "audio": Refused("answers are texts"),
    "suffix": Refused("a prompt is continued; nothing is inserted", ("",)),
    "store": Refused("nothing is stored", (False,)),
    "service_tier": Refused("only one tier is supported", ("auto", "default")),
    "web_search_options": Refused("nothing is fetched"),
}
"""Fields of OpenAI's and vLLM's clients that no body declares."""

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OF_ONE_ENDPOINT: dict[str, tuple[str, tuple[Any, ...]]] = {
    "echo": (_COMPLETIONS, (False,)),
    "best_of": (_COMPLETIONS, (1,)),
    "add_special_tokens": (_COMPLETIONS, (False,)),
    "top_logprobs": (_CHAT, (0,)),
    "add_generation_prompt": (_CHAT, (True,)),
    "chat_template_kwargs": (_CHAT, ({},)),
    "tools": (_CHAT, ([],)),
    "tool_choice": (_CHAT, ("none", "auto")),
    "parallel_tool_calls": (_CHAT, (True, False)),
}
"""By field: the endpoint that has it, and the neutral values that the other endpoint accepts."""


def without_neutral(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the undeclared fields that have an effect; raise ErrorResponse for a refused field."""
    left = {}
    for name, value in fields.items():
        field = FIELDS.get(name)
        if value is None:
            continue
        if isinstance(field, Unused):
            if not isinstance(value, field.kind):
                expected = "an object" if field.kind is dict else "a string"
                raise bad_request(f"{name} must be {expected}; change it, or leave it out", name)
        elif isinstance(field, Refused):
            if not any(_equals_in_json(value, each) for each in field.neutral):
                raise refusal(name, field)
        elif name in OF_ONE_ENDPOINT:
            other, neutral = OF_ONE_ENDPOINT[name]
            if not any(_equals_in_json(value, each) for each in neutral):
                raise bad_request(f"{name} is a field of {other}; leave it out", name)
        else:
            left[name] = value
    return left


def refusal(name: str, field: Refused) -> ErrorResponse:
    """Return the response to an unsupported value of a field."""
    allowed = " or ".join(map(json.dumps, field.neutral)) or "null"
    message = (
        f"this value of {name} is not supported: {field.reason}; leave it out or use {allowed}"
    )
    return bad_request(message, name, "unsupported")


def _equals_in_json(value: Any, other: Any) -> bool:
    """Return whether two values are equal; true is not 1."""
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)
