"""Fields of OpenAI's that change nothing here: taken where they ask for nothing, else refused."""

from __future__ import annotations

from typing import Any

from dsbd_ort.openai_server.refusal import bad_request

# What each may be, beside null: clients send these values on their own. A value that asks for
# something is refused, for an answer without it would be another than the one asked for.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
_IDENTIFIERS = ("prompt_cache_key", "safety_identifier")  # name the user or the cache, no more


def without_neutral(fields: dict[str, Any]) -> dict[str, Any]:
    """Return ``fields`` without those that ask for nothing.

    Raises:
        Refusal: one asks for what this server cannot do.
    """
    for name, value in fields.items():
        if name in _IDENTIFIERS and not isinstance(value, str):
            raise bad_request(f"{name} is no text; give a text or leave it out", name)
        if name in _NEUTRAL and not any(_is_same(value, known) for known in _NEUTRAL[name]):
            allowed = " or ".join(repr(known) for known in _NEUTRAL[name]) or "null"
            raise bad_request(
                f"{name} asks for what this server does not do; leave it out or use {allowed}",
                name,
                "unsupported",
            )
    return {
        name: value
        for name, value in fields.items()
        if name not in _NEUTRAL and name not in _IDENTIFIERS
    }


def check_messages(messages: list[dict[str, Any] | None]) -> None:
    """Refuse what a message holds beyond role, content and name, such as tool calls."""
    for index, further in enumerate(messages):
        for name, value in (further or {}).items():
            if value not in (None, [], ""):
                raise bad_request(
                    f"messages.{index}.{name} is more than this server reads; give role, content "
                    "and name alone",
                    f"messages.{index}.{name}",
                    "unsupported",
                )


def _is_same(value: Any, known: Any) -> bool:
    """Compare as JSON does: true is no number."""
    return isinstance(value, bool) is isinstance(known, bool) and bool(value == known)
