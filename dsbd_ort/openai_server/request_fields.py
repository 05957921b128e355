"""The request fields that OpenAI's and vLLM's clients send, one row each; nothing is ignored.

A field is done; or it is accepted if its value changes nothing here, and otherwise refused with the
reason. docs/serving.md shows this table. Options that are not in it are taken by their own names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from dsbd_ort.openai_server.errors import ErrorResponse, bad_request

_LATER = "not built yet"


@dataclass(frozen=True)
class Done:
    """A field that does what its name says.

    Attributes:
        meaning: what it means here.
        chat, completions: whether that endpoint has it.
    """

    meaning: str
    chat: bool = True
    completions: bool = True


@dataclass(frozen=True)
class Unused:
    """A field that cannot change an answer, for any value of its type."""

    meaning: str
    json_type: Literal["string", "object"] = "string"


@dataclass(frozen=True)
class Refused:
    """A field that is refused, unless its value states what happens anyway.

    Attributes:
        reason: why other values are refused.
        neutral: the values, in addition to null, that change nothing.
    """

    reason: str
    neutral: tuple[Any, ...] = ()


_A = {"string": "a string", "object": "an object"}

RequestField = Done | Unused | Refused

FIELDS: dict[str, RequestField] = {
    "model": Done("the name that the server was started with; any other is a 404"),
    "messages": Done(
        "`role`, `content` (a text or parts of type text), `name`, `tool_calls`, `tool_call_id`; "
        "filled into the bundle's chat template, which must have a place for each; their "
        "`cache_control` is unused",
        completions=False,
    ),
    "prompt": Done("a text, a list of texts, token ids, a list of lists of token ids", chat=False),
    "max_tokens": Done(
        "`max_new_tokens` [as many as the context holds]; 0 with `echo`: the prompt alone"
    ),
    "max_completion_tokens": Done("the same"),
    "n": Done(
        "number of independent samples; of a search, the number of its best beams, or fewer if it "
        "finds fewer sequences; greedy gives copies"
    ),
    "best_of": Done("this many are generated, and the `n` of highest score returned", chat=False),
    "use_beam_search": Done(
        "the best `n` of a beam search with `num_beams` beams [the largest of 4, `n` and, in "
        "completions, `best_of`]"
    ),
    "stop": Done("`stop_strings`: a text or up to 16, of 256 characters at most"),
    "stop_token_ids": Done("token ids that end a sequence, in addition to the model's own"),
    "ignore_eos": Done("true: the model's own end-of-sequence tokens end nothing"),
    "logprobs": Done(
        "completions: this many of the most probable tokens, 0 to 20, in addition to each token's "
        "own; chat: true or false"
    ),
    "top_logprobs": Done("0 to 20, with `logprobs` true", completions=False),
    "echo": Done(
        "the answer begins with the prompt, with `logprobs` also its log-probabilities", chat=False
    ),
    "stream": Done("server-sent events, `data: [DONE]` at the end"),
    "stream_options": Done("`include_usage`, and vLLM's `continuous_usage_stats`"),
    "chat_template_kwargs": Done("variables of the chat template", completions=False),
    "add_generation_prompt": Done("of the chat template; true by default", completions=False),
    "add_special_tokens": Done(
        "whether a text gets the tokenizer's special tokens; true by default", chat=False
    ),
    "user": Unused("name of the end user"),
    "safety_identifier": Unused("name of the end user"),
    "prompt_cache_key": Unused("prompts that begin alike share their cache rows anyway"),
    "request_id": Unused("name of the request"),
    "metadata": Unused("of stored answers; none is stored", "object"),
    "min_tokens": Done("`min_new_tokens`: an answer has at least this many tokens"),
    "bad_words": Refused(_LATER, ([],)),
    "allowed_token_ids": Refused(_LATER),
    "response_format": Done("types `text`, `json_object` and `json_schema`; `strict` or not"),
    "structured_outputs": Done(
        "vLLM's: one of `json`, `regex`, `choice`, `grammar`, `json_object`; JSON is on one line "
        "unless `disable_any_whitespace` is false"
    ),
    "guided_json": Done("`json` of `structured_outputs`, as older clients name it"),
    "guided_regex": Done("`regex` of it"),
    "guided_choice": Done("`choice` of it"),
    "guided_grammar": Done("`grammar` of it"),
    "constraint": Done(
        "as in DecodingConfig, as plain data (docs/constraints.md); a `trie` is one that the "
        "server was started with"
    ),
    "tools": Done(
        "functions whose arguments are objects by a JSON schema; their `cache_control` is unused",
        completions=False,
    ),
    "tool_choice": Done(
        "`required`, a function, `none`; `auto`: calls between `<tool_call>` tags, by the chat "
        "template or as plain text",
        completions=False,
    ),
    "parallel_tool_calls": Done(
        "false: one call with `required`, at most 16 otherwise", completions=False
    ),
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
    "prediction": Refused("the draft model predicts"),
    "suffix": Refused("a prompt is continued; nothing is inserted", ("",)),
    "store": Refused("nothing is stored", (False,)),
    "service_tier": Refused("only one tier is supported", ("auto", "default")),
    "web_search_options": Refused("nothing is fetched"),
}

_ELSEWHERE: dict[str, tuple[Any, ...]] = {  # neutral values of fields of the other endpoint
    "echo": (False,),
    "best_of": (1,),
    "top_logprobs": (0,),
    "add_special_tokens": (False,),
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
}


def without_neutral(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields that no model of a body declares, without those that change nothing.

    Raises:
        ErrorResponse: a field is refused, or of a wrong type.
    """
    left = {}
    for name, value in fields.items():
        field = FIELDS.get(name)
        if value is None:
            continue
        if isinstance(field, Unused):
            if not isinstance(value, dict if field.json_type == "object" else str):
                message = f"{name} must be {_A[field.json_type]}; change it, or leave it out"
                raise bad_request(message, name)
        elif isinstance(field, Refused):
            if not any(_equals_in_json(value, each) for each in field.neutral):
                raise refusal(name, field)
        elif name in _ELSEWHERE:
            if not any(_equals_in_json(value, each) for each in _ELSEWHERE[name]):
                is_of_chats = isinstance(field, Done) and field.chat
                other = "/v1/chat/completions" if is_of_chats else "/v1/completions"
                raise bad_request(f"{name} is a field of {other}; leave it out", name)
        else:
            left[name] = value
    return left


def refusal(name: str, field: RequestField) -> ErrorResponse:
    """Return the response to a value of a field that is not supported."""
    assert isinstance(field, Refused)
    allowed = " or ".join(map(_json, field.neutral)) or "null"
    message = (
        f"this value of {name} is not supported: {field.reason}; leave it out or use {allowed}"
    )
    return bad_request(message, name, "unsupported")


def _equals_in_json(value: Any, other: Any) -> bool:
    """Return whether two values are equal; true is not 1."""
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)


def fields_table() -> str:
    """Return the table as docs/serving.md shows it, in Markdown."""
    rows = [_row(name, field) for name, field in FIELDS.items()]
    return "\n".join(["| field | | here |", "|---|---|---|", *rows])


def _row(name: str, field: RequestField) -> str:
    if isinstance(field, Done):
        where = "" if field.chat and field.completions else "chat" if field.chat else "completions"
        return f"| `{name}` | done{f', {where}' if where else ''} | {field.meaning} |"
    if isinstance(field, Unused):
        return f"| `{name}` | accepted, unused | {field.meaning} |"
    values = ", ".join(f"`{_json(value)}`" for value in field.neutral)
    accepted = f"{values} accepted, else refused" if values else "refused"
    return f"| `{name}` | {accepted} | {field.reason} |"


def _json(value: Any) -> str:
    return json.dumps(value)
