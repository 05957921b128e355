"""Prompts to distil from: distinct, chats, and the same for the same seed."""

from __future__ import annotations

import json

from lab.real_model.chats import write_chats


def test_chats(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_chats(tmp_path / name, 200, seed)
    first, again, other = ((tmp_path / name).read_text() for name in "abc")
    assert first == again != other
    chats = [json.loads(line)["messages"] for line in first.splitlines()]
    questions = [messages[0]["content"] for messages in chats]
    assert len(set(questions)) == 200 and not any("{" in question for question in questions)
    assert {len(messages) for messages in chats} == {1, 3}
    assert all(messages[-1]["role"] == "user" for messages in chats)
