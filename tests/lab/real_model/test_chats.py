"""Questions to distil from: the beginning of a user's turn, and what a batch answers to it."""

from __future__ import annotations

import json

from dsbd_runtime.text.chat_template import ChatTemplate
from lab.real_model.chats import write_chats, write_prompts

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


def test_prompts_are_the_beginning_of_a_turn_with_seeds_of_their_own(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    write_prompts(tmp_path / "prompts.jsonl", ChatTemplate.from_folder(tmp_path), 3, seed=5)
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["<|user|>"] * 3
    assert [line["seed"] for line in lines] == [5, 6, 7]
    assert {line["strategy"] for line in lines} == {"sample"}


def test_questions_that_ended_are_chats_once_each(tmp_path):
    answers = [
        ("What is gravity?", "eos"),
        ("And then I was cut off in the", "length"),
        (" what is Gravity? ", "eos"),
        ("Hi", "eos"),
        ("Name three rivers of Europe.", "eos"),
    ]
    lines = [
        json.dumps({"sequences": [{"text": text, "finish_reason": reason}]})
        for text, reason in answers
    ]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))
    assert write_chats(tmp_path / "answers.jsonl", tmp_path / "chats.jsonl") == 2
    lines = (tmp_path / "chats.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    assert [chat[-1]["content"] for chat in chats] == [answers[0][0], answers[4][0]]
    assert all(chat[0]["role"] == "user" for chat in chats)
