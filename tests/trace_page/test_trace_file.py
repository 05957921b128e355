"""The file that is written: whole, alone, and safe whatever its texts are."""

from __future__ import annotations

import json
import re

import pytest

import dsbd_ort
from dsbd_ort.trace_page.trace_file import page_html
from dsbd_runtime.errors import InputError


def embedded(page):
    elements = re.findall(r'<script id="trace" type="application/json">(.*?)</script>', page, re.S)
    return elements


def test_page_holds_the_json_and_nothing_ends_it_early(requests):
    fields = requests["dsbd"][2]
    page = page_html(fields)
    (data,) = embedded(page)
    assert json.loads(data) == json.loads(json.dumps(fields))
    assert data.isascii() and "<" not in data and "/* trace */" not in page
    assert page.count("</script>") == 2 and "console.error" not in page.replace(data, "")


def test_page_needs_nothing_else(requests):
    page = page_html(requests["dsbd"][2])
    markup = page.replace(embedded(page)[0], "")
    assert "default-src 'none'" in markup
    assert set(re.findall(r"https?://[^\"']*", markup)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"/\* \w+ \*/", markup)  # every part was put in
    assert not re.findall(r"src=|@import|fetch\(|url\(", markup)


def test_texts_that_look_like_the_template_stay_texts(requests):
    fields = requests["dsbd"][2] | {"program": "/* style */ /* script */ /* trace */"}
    assert json.loads(embedded(page_html(fields))[0])["program"] == fields["program"]


def test_suffix_decides_and_others_are_refused(requests, pipeline, tmp_path):
    trace, _, fields = requests["dsbd"]
    dsbd_ort.write_trace(tmp_path / "trace.json", trace, pipeline.tokenizer)
    dsbd_ort.write_trace(tmp_path / "trace.html", trace, pipeline.tokenizer)
    assert json.loads((tmp_path / "trace.json").read_text()) == json.loads(json.dumps(fields))
    assert (tmp_path / "trace.html").read_text().startswith("<!DOCTYPE html>")
    for name, words in (("trace.txt", "ends in .html"), ("no/trace.html", "is not a folder")):
        with pytest.raises(InputError, match=words):
            dsbd_ort.write_trace(tmp_path / name, trace, pipeline.tokenizer)
