"""Programs in C and C++ get what Python gets: from threads, loaded late, in any surroundings."""

import json
import os
import shutil
from dataclasses import dataclass
from typing import Any

import pytest

from dsbd_ort import Pipeline
from dsbd_ort.requests.results import result_object
from tests.embedding.conftest import PROGRAMS, output_of
from tests.runtime.bundle_edits import with_files

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


TEXTS = ["def read(", "a", "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN}", "x = [1, 2", "  "]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_beams": 2, "width_policy": "fixed"},
    {"num_beams": 3, "num_return_sequences": 2, "min_beams": 2},
    {"strategy": "beam-sample", "num_beams": 2},
    {"strategy": "speculative", "draft_length": 3},
    {"strategy": "tree-speculative"},
    {"strategy": "sample", "temperature": 0.7, "top_k": 5},
    {"strategy": "beam-search", "num_beams": 2},
    {"strategy": "speculative-beam-search", "length_penalty": 0.5},
    {"strategy": "greedy"},
    {"strategy": "mjsd"},
    {"constraint": {"regex": "[a-d]{2,6}"}, "num_beams": 3},
    {"constraint": {"json_schema": {"enum": ["no", [1, 2]]}}, "strategy": "sample"},
    {"coupling": "rejection", "stop_strings": ["e", "\n"]},
]
IDS = [[1, 2, 3], [250]]


@dataclass(frozen=True)
class Asked:
    """One request, by text or by token ids."""

    prompt: str | list[int]
    options: dict[str, Any]

    @property
    def line(self):
        """The request for ask.c."""
        is_text = isinstance(self.prompt, str)
        prompt = self.prompt if is_text else " ".join(map(str, self.prompt))
        return "\t".join(["text" if is_text else "ids", prompt, json.dumps(self.options)])


def requests():
    """Return every beginning with every set of options, each with another end and another seed."""
    pairs = [(prompt, options) for prompt in [*TEXTS, *IDS] for options in OPTIONS]
    return [
        Asked(
            f"{prompt}{seed}" if isinstance(prompt, str) else [*prompt, seed],
            {"max_new_tokens": 8, "seed": seed, **options},
        )
        for seed, (prompt, options) in enumerate(pairs)
    ]


def answers(pipeline, asked):
    """Return what lone requests get."""
    return [pipeline.generate(request.prompt, **request.options) for request in asked]


ASKED = requests()


def run(compiled, bundle, lines):
    """Return the three fields of every line's answer, and what the program said in the end."""
    settings = '{"num_threads": 1, "provider": "cpu"}'
    text = "".join(f"{line}\n" for line in lines)
    done = output_of(compiled(PROGRAMS / "ask.c"), bundle, settings, input=text)
    assert done.returncode == 0, done.stderr
    return [line.split("\t") for line in done.stdout.splitlines()], done.stderr


def check_result(fields, wanted):
    """Check the object of a result; log-probabilities hang on how rows are batched, in float32."""
    expected = result_object(wanted)
    assert fields["version"] == expected["version"]
    assert fields["stats"].keys() == expected["stats"].keys()
    assert fields["stats"]["num_output_tokens"] == wanted.stats.num_output_tokens
    for found, sequence in zip(fields["sequences"], expected["sequences"], strict=True):
        for name in ("token_logprobs", "logprob", "score"):
            sequence[name] = pytest.approx(sequence[name], abs=1e-4)
        assert found == sequence


def streamed(field):
    pairs = [pair.split(":") for pair in field.split()]
    return [int(token) for token, _ in pairs], [float(logprob) for _, logprob in pairs]


@pytest.fixture(scope="module")
def chat_bundle(tmp_path_factory, tiny_bundle):
    """A bundle with a chat template, at a path that is not ASCII."""
    folder = tmp_path_factory.mktemp("chat") / "b\N{LATIN SMALL LETTER U WITH DIAERESIS}ndel"
    return with_files(tiny_bundle.path, folder, {"chat_template.jinja": TEMPLATE})


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


NUM_THREADS = 4
IN_THREADS = [request for request in ASKED if isinstance(request.prompt, str)][::4]


def test_four_threads_at_once(compiled, tiny_bundle):
    with Pipeline.from_bundle(tiny_bundle.path, num_threads=1) as pipeline:
        expected = [result.sequences for result in answers(pipeline, IN_THREADS)]
    text = "".join(f"{asked.prompt}\t{json.dumps(asked.options)}\n" for asked in IN_THREADS)
    program = compiled(PROGRAMS / "threads.cpp")
    done = output_of(program, tiny_bundle.path, str(NUM_THREADS), input=text)
    assert done.returncode == 0, done.stderr
    times_seen = [0] * len(IN_THREADS)
    for line in done.stdout.splitlines():
        index, streamed, result = line.split("\t")
        wanted = expected[int(index)]
        sequences = json.loads(result)["sequences"]
        assert [found["token_ids"] for found in sequences] == [w.token_ids for w in wanted]
        assert [found["text"] for found in sequences] == [w.text for w in wanted]
        assert [int(token) for token in streamed.split()] == wanted[0].token_ids
        times_seen[int(index)] += 1
    assert times_seen == [NUM_THREADS] * len(IN_THREADS)


FOREIGN = {"PYTHONHOME": "/nowhere", "PYTHONPATH": "/nowhere", "LC_ALL": "C"}


def test_loaded_late_in_a_foreign_environment_and_never_closed(
    compiled, c_library, tiny_bundle, tmp_path
):
    folder = shutil.copytree(tiny_bundle.path, tmp_path / "\N{SNOWMAN}")
    program, library = compiled(PROGRAMS / "loaded.c"), c_library / "libdsbd.so"
    done = output_of(program, library, folder, env={**os.environ, **FOREIGN})
    assert (done.returncode, done.stderr) == (0, "")
    with Pipeline.from_bundle(tiny_bundle.path) as pipeline:
        wanted = pipeline.generate("ab", max_new_tokens=4, seed=0).sequences[0].token_ids
    assert json.loads(done.stdout)["sequences"][0]["token_ids"] == wanted
