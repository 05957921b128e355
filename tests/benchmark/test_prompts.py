"""Reading prompts."""

from __future__ import annotations

import pytest

from dsbd_ort.benchmark.bench_run import PROMPTS, BenchmarkError, read_prompts


def test_built_in_prompts_are_different_and_end_where_a_token_ends():
    assert len(set(PROMPTS)) == len(PROMPTS) >= 8
    assert all(prompt.endswith(":") for prompt in PROMPTS)


def test_text_has_a_prompt_a_line_and_jsonl_an_object(tmp_path):
    text, jsonl = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("def f(x):\n\nclass A:\n")
    jsonl.write_text('{"prompt": "def f(x):\\n    y:"}\n{"prompt": "b", "id": 3}\n')
    assert read_prompts(text) == ["def f(x):", "class A:"]
    assert read_prompts(jsonl) == ["def f(x):\n    y:", "b"]


DAMAGED = [  # (file name, content, words of the message)
    ("a.txt", "\n\n", "has no prompt"),
    ("a.jsonl", '{"prompt": "a"}\nnonsense\n', "line 2 is invalid JSON"),
    ("a.jsonl", '{"text": "a"}\n', 'no text under "prompt"'),
    ("a.jsonl", "[" * 100_000, "line 1 is invalid JSON"),
    ("a.jsonl", '["a"]\n', 'no text under "prompt"'),
]


@pytest.mark.parametrize(("name", "content", "words"), DAMAGED)
def test_damaged_files_are_refused(tmp_path, name, content, words):
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(BenchmarkError, match=words):
        read_prompts(file)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(BenchmarkError, match="cannot be read"):
        read_prompts(tmp_path / "nothing")
