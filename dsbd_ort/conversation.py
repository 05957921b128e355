"""Messages of a chat, oldest first."""

from __future__ import annotations

Messages = list[dict[str, str]]


def user_messages(text: str, system: str | None = None) -> Messages:
    """Return the conversation that begins with what the user says."""
    begun = [] if system is None else [{"role": "system", "content": system}]
    return [*begun, {"role": "user", "content": text}]


def with_answer(messages: Messages, text: str) -> Messages:
    """Return the conversation with the model's answer."""
    return [*messages, {"role": "assistant", "content": text}]
