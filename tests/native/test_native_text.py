"""Requests in text to the native library: prompts, stop strings, steps, wrong calls, threads.

That its tokenizers are Python's is tested for each kind by the texts of native/text itself.
"""

import json
import shutil
import subprocess

import pytest

from dsbd_ort import Pipeline
from dsbd_ort.engine import Service
from dsbd_runtime.bundle_files.bundle import TEXT_CHECKS_FILE
from tests.embedding.conftest import PROGRAMS, output_of
from tests.embedding.test_c_program import TEXTS
from tests.embedding.test_misuse import ERROR
from tests.embedding.test_misuse import EXPECTED as EXPECTED_OF_PYTHON
from tests.native.conftest import OWN_PROGRAMS
from tests.native.test_native_programs import FIXED, checked_result
from tests.native.text_command import with_checks
from tests.runtime.bundle_edits import edited, put, with_files

HELD = {"encodes": True, "decodes": True, "renders": True, "reason": None}
LIKELY = {"256": 30.0, "257": 30.0, "78": 30.0, "68": 30.0}  # <bos>, <eos>, "o", "e"
OPTIONS = [
    {"stop_strings": ["e", "\n"], **FIXED},
    {"stop_strings": ["ab", "a\N{SNOWMAN}"], "min_new_tokens": 3, "strategy": "sample"},
    {"num_beams": 3, "stop_strings": ["t", "q", "z"], "num_return_sequences": 2, **FIXED},
    {"strategy": "beam-search", "num_beams": 2},
    *(
        {"stop_strings": stops, "logit_bias": LIKELY, **more, **FIXED}
        for stops in (
            ["<bos>"],
            ["<bos><eos>", "<eos><eos>"],
            ["<bos>e", "o<bos>", "\n<eos>", "oo"],
        )
        for more in (
            {"eos_token_id": []},
            {"eos_token_id": [], "num_beams": 3, "min_new_tokens": 2},
        )
    ),
    {"predicted_text": "def read(", "strategy": "speculative", "drafter": "ngram", **FIXED},
]


@pytest.fixture(scope="module")
def text_bundle(tiny_bundle, tmp_path_factory):
    """The tiny bundle with the checks that the export writes."""
    return with_checks(tiny_bundle.path, tmp_path_factory.mktemp("text") / "tiny")


def test_texts_get_what_python_gives(with_native, text_bundle, tiny_bundle):
    requests = [
        (f"{text}{seed}", {"max_new_tokens": 12, "seed": seed, **options})
        for seed, text in enumerate(TEXTS)
        for options in OPTIONS
    ]
    lines = "".join(f"text\t{prompt}\t{json.dumps(options)}\n" for prompt, options in requests)
    program = with_native(PROGRAMS / "ask.c")
    done = output_of(program, text_bundle, '{"num_threads": 1}', input=lines)
    assert done.returncode == 0, done.stderr
    with (
        Pipeline.from_bundle(tiny_bundle.path, num_threads=1) as pipeline,
        Service(pipeline) as service,
    ):
        for (prompt, options), line in zip(requests, done.stdout.splitlines(), strict=True):
            _, text, result = line.split("\t")
            fields, wanted = json.loads(result), service.generate(prompt, **options)
            assert [found["text"] for found in fields["sequences"]] == [
                sequence.text for sequence in wanted.sequences
            ]
            assert bytes.fromhex(text).decode() == wanted.sequences[0].text
            checked_result(fields, wanted)


# The calls of test_misuse.py; what differs by how the native library reads and says it.
OTHERWISE = {
    "open: no JSON": (ERROR, "settings is invalid JSON ([json.exception.parse_error.101]"),
    "open: no object": (ERROR, "settings is [1], expected an object"),
    "open: unknown setting": (ERROR, "settings: bundle is "),
    "open: wrong limit": (ERROR, "settings: max_requests is 0, expected a whole number from 1"),
    "open: wrong type": (ERROR, "settings: num_threads is true, expected a whole number"),
    "open: wrong provider": (ERROR, 'provider is "abacus", which is no execution provider'),
    "generate: options no JSON": (ERROR, "options is invalid JSON"),
    "generate: unknown option": (ERROR, "unknown option 'prompt'"),
    "generate: lone surrogate": (ERROR, "options is invalid JSON"),
    "chat: no template": (ERROR, ""),
}


def test_every_wrong_call_has_its_status_and_message(with_native, text_bundle):
    done = output_of(with_native(PROGRAMS / "misuse.c"), text_bundle.name, cwd=text_bundle.parent)
    assert (done.returncode, done.stderr) == (0, "")
    found = [line.split("\t") for line in done.stdout.splitlines()]
    assert [name for name, _, _ in found] == [name for name, _, _ in EXPECTED_OF_PYTHON]
    for (name, status, message), (_, *wanted) in zip(found, EXPECTED_OF_PYTHON, strict=True):
        status_wanted, begins = OTHERWISE.get(name, wanted)
        assert int(status) == status_wanted, (name, message)
        assert message.startswith(begins), name


def test_four_threads_at_once(with_native, text_bundle, tiny_pipe):
    requests = [(text, {"max_new_tokens": 6, "seed": seed}) for seed, text in enumerate(TEXTS)]
    lines = "".join(f"{prompt}\t{json.dumps(options)}\n" for prompt, options in requests)
    done = output_of(with_native(PROGRAMS / "threads.cpp"), text_bundle, "4", input=lines)
    assert done.returncode == 0, done.stderr
    expected = [tiny_pipe.generate(prompt, **options).sequences[0] for prompt, options in requests]
    answers = [line.split("\t") for line in done.stdout.splitlines()]
    assert sorted(int(index) for index, _, _ in answers) == sorted(4 * list(range(len(TEXTS))))
    for index, streamed, result in answers:
        best = json.loads(result)["sequences"][0]
        wanted = expected[int(index)]
        assert (best["token_ids"], best["text"]) == (wanted.token_ids, wanted.text)
        assert [int(token) for token in streamed.split()] == wanted.token_ids


def test_a_program_gives_its_own_text(with_native, tiny_bundle, tiny_pipe):
    """For a bundle without native text: prompts, steps, stop strings and results."""
    program = with_native(OWN_PROGRAMS / "own_text.c")
    for seed in range(4):
        options = {"max_new_tokens": 16, "seed": seed, "stop_strings": ["q", "7"]}
        done = output_of(program, tiny_bundle.path, "read(", json.dumps(options))
        assert done.returncode == 0, done.stdout
        streamed, result = done.stdout.splitlines()
        expected = tiny_pipe.generate("read(", **options).sequences[0]
        best = json.loads(result)["sequences"][0]
        assert best["token_ids"] == expected.token_ids
        assert best["finish_reason"] == expected.finish_reason
        shown = "".join(chr(33 + token) if token < 94 else "~" for token in best["token_ids"])
        assert best["text"] == shown.split("q")[0].split("7")[0]
        assert bytes.fromhex(streamed).decode() == best["text"]
    special = {"max_new_tokens": 16, "seed": 1, "logit_bias": {"200": 5.0}}
    done = output_of(
        program, tiny_bundle.path, "read(", json.dumps({**special, "stop_strings": "^"})
    )
    streamed, result = done.stdout.splitlines()
    expected = tiny_pipe.generate(
        [ord(letter) - 33 for letter in "read("], eos_token_id=[200], **special
    ).sequences[0]
    best = json.loads(result)["sequences"][0]
    assert (best["token_ids"], best["finish_reason"]) == (expected.token_ids, "stop")
    assert bytes.fromhex(streamed).decode() == best["text"]
    assert len(best["text"]) == len(best["token_ids"]) - 1
    done = output_of(program, tiny_bundle.path, "refuse", "{}")
    assert done.stdout == "\nencode has refused the request\n"


REASON = "the first difference"
GATES = [  # what an older manifest says, which of ids, a text and a chat are refused and why
    (None, (None, "no text_checks.json", "no text_checks.json")),
    ({**HELD, "encodes": False, "reason": REASON}, (None, REASON, REASON)),
    ({**HELD, "decodes": False, "reason": REASON}, (None, REASON, REASON)),
    ({**HELD, "renders": False, "reason": REASON}, (None, None, REASON)),
    ({**HELD, "renders": None}, (None, None, "has no chat template")),
]


@pytest.mark.parametrize(("entry", "refusals"), GATES)
def test_what_an_older_export_measured(with_native, tiny_bundle, tmp_path, entry, refusals):
    folder = shutil.copytree(tiny_bundle.path, tmp_path / "tiny")
    edited(folder, put(["target", "native_text"], entry))
    shows_text = entry is not None and entry["decodes"]
    check_answers(with_native, folder, refusals, shows_text)


CHANGED = {"encodes": [1, 2], "decodes": "other"}
CHECKS = [  # the check that fails, whether ids, a text and a chat are refused and why
    (None, (None, None, "has no chat template")),
    ("encodes", (None, "gives [", "gives [")),
    ("decodes", (None, None, "has no chat template")),
]


@pytest.mark.parametrize(("question", "refusals"), CHECKS)
def test_the_checks_of_a_bundle(with_native, tiny_bundle, tmp_path, question, refusals):
    def change(checks):
        if question is not None:
            checks[question][7][1] = CHANGED[question]

    folder = with_checks(tiny_bundle.path, tmp_path / "tiny", change)
    check_answers(with_native, folder, refusals, shows_text=question != "decodes")


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is invalid JSON"), ('{"encodes": [[1]]}', "expected a request and its answer")],
)
def test_damaged_checks_are_refused(native_build, tiny_bundle, tmp_path, text, words):
    folder = with_files(tiny_bundle.path, tmp_path / "tiny", {TEXT_CHECKS_FILE: text})
    command = [native_build / "dsbd_native", folder, "--ids", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    (folder / TEXT_CHECKS_FILE).write_text(f"{text} ")
    edited(folder, lambda manifest: manifest["files"].pop(TEXT_CHECKS_FILE))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "the manifest does not list it" in done.stderr, done.stderr


def check_answers(with_native, folder, refusals, shows_text):
    """Send ids, a text and a chat; see which are refused, and whether results have a text."""
    messages = json.dumps([{"role": "user", "content": "Hello"}])
    lines = [("ids", "1 2"), ("text", "ab"), ("chat", messages)]
    text = "".join(f'{kind}\t{prompt}\t{{"max_new_tokens": 2}}\n' for kind, prompt in lines)
    done = output_of(with_native(PROGRAMS / "ask.c"), folder, "{}", input=text)
    answers = [line.split("\t")[2] for line in done.stdout.splitlines()]
    for answer, refusal in zip(answers, refusals, strict=True):
        if refusal is not None:
            assert answer.startswith("1 the native library does not read") and refusal in answer
        else:
            shown = json.loads(answer)["sequences"][0]["text"]
            assert (shown is not None) == shows_text
