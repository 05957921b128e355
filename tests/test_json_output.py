"""What is written is JSON for every reader: no NaN, no lone surrogate, whatever it stands in."""

from __future__ import annotations

import json
import math

import pytest

from dsbd_ort.results import json_text


def test_numbers_that_json_does_not_have_become_null():
    fields = {"a": math.nan, "b": [math.inf, {"c": (-math.inf, 1.5)}], "d": None, "e": 10**300}
    expected = '{"a": null, "b": [null, {"c": [null, 1.5]}], "d": null, "e": 1%s}' % ("0" * 300)
    assert json_text(fields) == expected


@pytest.mark.parametrize("text", ["\ud800", "é\ud800", "\ud83d"])
def test_a_lone_surrogate_is_escaped(text):
    line = json_text({"text": text, text: math.nan})
    assert line.isascii() and json.loads(line) == {"text": text, text: None}


def test_characters_stand_for_themselves_unless_ascii_is_wanted():
    assert json_text({"text": "é\n"}) == '{"text": "é\\n"}'
    assert json_text({"text": "é\n"}, ensure_ascii=True) == '{"text": "\\u00e9\\n"}'
    assert json_text({"a": [1]}, indent=1) == '{\n "a": [\n  1\n ]\n}'


def test_what_python_could_not_write_at_all_is_still_an_error():
    with pytest.raises(ValueError, match="limit"):
        json_text({"a": 10**5000})
