"""OpenAI's word for what ended a sequence."""

from __future__ import annotations

_WORDS = {"eos": "stop", "stop": "stop", "length": "length"}


def openai_finish_reason(reason: str) -> str:
    """Return "stop" for an end-of-sequence token or a stop text, "length" for the limit."""
    return _WORDS[reason]
