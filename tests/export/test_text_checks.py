"""Checks of text in a bundle: the runtime's answers, few of many tokens, the same on every day."""

import json

from dsbd_export.gate.text_checks import QUESTIONS, write_text_checks
from dsbd_runtime.text.tokenizer import Tokenizer
from tests.native.text_command import written

DATED = '{{ strftime_now("%d %b %Y") }}{% for m in messages %}{{ m.content }}{% endfor %}'


def checks_in(folder):
    write_text_checks(folder, None)
    text = (folder / "text_checks.json").read_text(encoding="utf-8")
    return json.loads(text), len(text)


def test_answers_are_those_of_the_runtime(tmp_path):
    folder = written("llama_3", tmp_path)
    (folder / "chat_template.jinja").write_text(DATED)
    checks, size = checks_in(folder)
    assert tuple(checks) == QUESTIONS and size < 200_000
    tokenizer = Tokenizer(folder, bos_token_id=None)
    for request, ids in checks["encodes"]:
        found = tokenizer.encode(request["encode"], add_special_tokens=request["special"])
        assert found == ids
    whole = [(each["decode"], text) for each, text in checks["decodes"] if "decode" in each]
    assert [tokenizer.decode(ids) for ids, _ in whole] == [text for _, text in whole]
    after = {tuple(ids): text for ids, text in whole}
    for request, pieces in checks["decodes"]:
        if "stream" in request:
            assert after[tuple(request["stream"])].endswith("".join(pieces))
    assert len(checks["encodes"]) > 200 and len(whole) > 100
    assert {text[:11] for _, text in checks["renders"]} == {"09 Jan 2025"}


def test_what_the_runtime_refuses_has_no_answer(tmp_path):
    """A decoder that strips more characters than a token has panics."""
    content = json.loads((written("llama_2", tmp_path) / "tokenizer.json").read_text())
    content["decoder"] = {"type": "Strip", "content": "a", "start": 0, "stop": 9}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    checks, _ = checks_in(tmp_path)
    assert None in [answer for _, answer in checks["decodes"]]
    assert None not in [answer for _, answer in checks["encodes"]]


def test_many_special_tokens_are_not_all_asked(tmp_path):
    content = json.loads((written("llama_2", tmp_path) / "tokenizer.json").read_text())
    first = max(content["model"]["vocab"].values()) + 1000
    content["added_tokens"] += [
        {"id": first + i, "content": f"<unused{i}>", "special": True, "single_word": False,
         "lstrip": False, "rstrip": False, "normalized": False} for i in range(6000)
    ]  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert checks_in(tmp_path)[1] < 300_000
