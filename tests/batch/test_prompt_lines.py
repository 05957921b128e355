"""Lines of the input: what they ask for, what is refused, hashes and seeds."""

from __future__ import annotations

import pytest

from dsbd_ort.batch.prompt_lines import BatchError, RawLine, parsed_object, prompt_line, read_lines
from dsbd_runtime.errors import InputError


def test_lines_are_numbered_and_blank_ones_are_no_requests(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n   \n{"b": 2}')
    assert list(read_lines(file)) == [RawLine(1, b'{"a": 1}'), RawLine(4, b'{"b": 2}')]


def test_a_missing_input_is_named(tmp_path):
    with pytest.raises(BatchError, match=r"--input .*nothing\.jsonl cannot be read: No such file"):
        list(read_lines(tmp_path / "nothing.jsonl"))


def test_options_of_a_line():
    line = prompt_line({"prompt": "a", "id": 7, "num_beams": 2, "stop_strings": ["x"]})
    assert line.prompt == "a" and line.messages is None
    assert line.options == {"num_beams": 2, "stop_strings": ["x"]}
    assert prompt_line({"messages": [1]}).messages == [1]


REFUSED = [
    (b"{", "is invalid JSON"),
    (b"\xff", "is invalid JSON"),
    (b"[" * 100_000, "is nested deeper than 64 levels"),
    (b"[1]", "is a JSON list"),
    (b"{}", "neither prompt nor messages"),
    (b'{"prompt": "a", "messages": []}', "prompt and messages"),
    (b'{"prompt": 7}', "prompt is 7; expected a text"),
    (b'{"messages": "a"}', "messages is 'a'; expected a list"),
    (b'{"prompt": "a", "beams": 2}', "the line has 'beams'; did you mean 'num_beams'"),
    (b'{"prompt": "a", "x": 2}', "'x'; expected id, prompt or messages, or a field of"),
]


@pytest.mark.parametrize(("content", "words"), REFUSED, ids=lambda value: repr(value[:20]))
def test_what_is_no_request_is_named(content, words):
    with pytest.raises(InputError, match=words):
        prompt_line(parsed_object(content))


def test_hash_and_seed_depend_on_what_they_should():
    line = RawLine(3, b"{}")
    assert line.request_hash("s") == RawLine(3, b"{}").request_hash("s")
    others = [RawLine(4, b"{}"), RawLine(3, b"[]")]
    hashes = {raw.request_hash("s") for raw in [line, *others]} | {line.request_hash("t")}
    assert len(hashes) == 4
    seeds = {RawLine(number, b"").seed(seed) for number in range(50) for seed in range(4)}
    assert len(seeds) == 200 and max(seeds) < 2**48
    assert line.seed(5) == RawLine(3, b"other").seed(5)
