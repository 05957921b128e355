"""A C program gets what Python gets: tokens, texts, figures, streams."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dsbd_ort import GenerationResult, Pipeline
from dsbd_ort.results import result_object
from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle, write_manifest
from tests.embedding.asked import answers, requests
from tests.embedding.conftest import PROGRAMS, Compile

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
ASKED = requests()


def run(compiled: Compile, bundle: Path, lines: list[str]) -> tuple[list[list[str]], str]:
    """Return the three fields of every line's answer, and what the program said in the end."""
    done = subprocess.run(
        [compiled(PROGRAMS / "ask.c"), bundle, '{"num_threads": 1, "provider": "cpu"}'],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [line.split("\t") for line in done.stdout.splitlines()], done.stderr


def check_result(fields: dict[str, Any], wanted: GenerationResult) -> None:
    """Check the object of a result; log-probabilities hang on how rows are batched, in float32."""
    expected = result_object(wanted)
    assert fields["version"] == expected["version"]
    assert fields["stats"].keys() == expected["stats"].keys()
    assert fields["stats"]["num_output_tokens"] == wanted.stats.num_output_tokens
    for found, sequence in zip(fields["sequences"], expected["sequences"], strict=True):
        for name in ("token_logprobs", "logprob", "score"):
            sequence[name] = pytest.approx(sequence[name], abs=1e-4)
        assert found == sequence


def streamed(field: str) -> tuple[list[int], list[float]]:
    pairs = [pair.split(":") for pair in field.split()]
    return [int(token) for token, _ in pairs], [float(logprob) for _, logprob in pairs]


@pytest.fixture(scope="module")
def chat_bundle(tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Bundle) -> Path:
    """A bundle with a chat template, at a path that is not ASCII."""
    folder = tmp_path_factory.mktemp("chat") / "b\N{LATIN SMALL LETTER U WITH DIAERESIS}ndel"
    shutil.copytree(tiny_bundle.path, folder)
    manifest = open_bundle(folder).manifest
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    entries = {"target": manifest.target, "draft": manifest.draft}
    write_manifest(folder, versions=manifest.versions, **entries)
    return folder


def test_eighty_prompts_get_what_python_gives(compiled, tiny_bundle):
    with Pipeline.from_bundle(tiny_bundle.path, num_threads=1) as pipeline:
        expected = answers(pipeline, ASKED)
    found, said = run(compiled, tiny_bundle.path, [request.line for request in ASKED])
    assert len(found) == len(ASKED) > 80
    for request, (steps, text, result), wanted in zip(ASKED, found, expected, strict=True):
        check_result(json.loads(result), wanted)
        best = json.loads(result)["sequences"][0]
        assert bytes.fromhex(text).decode() == best["text"], request
        assert streamed(steps) == (best["token_ids"], best["token_logprobs"]), request
    stats = json.loads(said)
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["max_rows"] > 0 and stats["kv_bytes"] > 0


def test_a_chat_goes_through_the_template(compiled, chat_bundle):
    messages = [{"role": "user", "content": "Guten Tag"}]
    options = {"max_new_tokens": 8, "seed": 3}
    line = f"chat\t{json.dumps(messages)}\t{json.dumps(options)}"
    [(_, _, result)], _ = run(compiled, chat_bundle, [line])
    with Pipeline.from_bundle(chat_bundle, num_threads=1) as pipeline:
        wanted = pipeline.generate(pipeline.chat_prompt(messages), **options)
    check_result(json.loads(result), wanted)


def test_an_error_leaves_the_next_request_alone(compiled, tiny_bundle):
    good = ASKED[0].line
    (_, bad, last), _ = run(compiled, tiny_bundle.path, [good, 'text\tab\t{"seed": -1}', good])
    assert bad == ["", "", "1 seed is -1; expected at least 0"]
    with Pipeline.from_bundle(tiny_bundle.path, num_threads=1) as pipeline:
        [wanted] = answers(pipeline, ASKED[:1])
    check_result(json.loads(last[2]), wanted)
