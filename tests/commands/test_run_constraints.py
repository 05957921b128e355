"""Constraints of dsbd-run: options, lines of a batch, and what both get from Python."""

import json
from functools import partial

import numpy as np
import pytest

from dsbd_ort import TokenTrie
from dsbd_ort.cli import run
from tests.commands.calls import answered, assert_one_line_error, called
from tests.constraints.json_schemas import SCHEMAS

dsbd_run = partial(called, run)
PROMPT = "def settings():\n    return "
GRAMMAR = 'start: "[" item ("," item){0,2} "]"\nitem: /[a-c]{1,3}/'


@pytest.fixture(scope="module")
def trie_file(demo_pipe, tmp_path_factory):
    file = tmp_path_factory.mktemp("tries") / "words.trie"
    texts = ["import os", "import re", "return None"]
    TokenTrie.from_texts(texts, demo_pipe.tokenizer.encode).save(file)
    return file


def token_ids(sequences):
    return [sequence["token_ids"] for sequence in sequences]


@pytest.mark.parametrize("num_beams", [1, 4])
def test_every_option_gives_what_python_gives(
    demo_bundle, demo_pipe, trie_file, tmp_path, num_beams
):
    schema, grammar = tmp_path / "schema.json", tmp_path / "list.lark"
    schema.write_text(json.dumps(SCHEMAS["nested"]))
    grammar.write_text(GRAMMAR)
    cases = [
        (["--json-schema", schema], {"json_schema": SCHEMAS["nested"]}),
        (["--json-object"], {"json_object": True}),
        (["--regex", "[0-9]{3}-[0-9]{2}"], {"regex": "[0-9]{3}-[0-9]{2}"}),
        (["--choice", "read", "--choice", "write"], {"choice": ["read", "write"]}),
        (["--grammar", grammar], {"grammar": GRAMMAR}),
        (["--trie", trie_file], {"trie": str(trie_file)}),
    ]
    options = {"num_beams": num_beams, "seed": 3, "max_new_tokens": 60}
    common = ["--num-beams", num_beams, "--seed", 3, "--max-new-tokens", 60, "--threads", 1]
    if num_beams == 1:
        options["strategy"] = "speculative"
        common += ["--strategy", "speculative"]
    for flags, data in cases:
        done = dsbd_run(demo_bundle, "--prompt", PROMPT, "--json", *common, *flags)
        assert done.exit_code == 0, done.stderr
        wanted = demo_pipe.generate(PROMPT, constraint=data, **options)
        assert token_ids(json.loads(done.stdout)["sequences"]) == [
            sequence.token_ids for sequence in wanted.sequences
        ]


def test_lines_of_a_batch(demo_bundle, demo_pipe, tmp_path):
    common = {"prompt": PROMPT, "max_new_tokens": 450}
    lines = [
        {**common, "constraint": {"json_schema": schema}, "seed": seed, **strategy}
        for seed, schema in enumerate(list(SCHEMAS.values())[:3])
        for strategy in ({"strategy": "speculative"}, {"strategy": "dsbd", "num_beams": 4})
    ]
    answers = answered(demo_bundle, tmp_path, lines, "--concurrency", 4, "--threads", 1)
    for line, answer in zip(lines, answers, strict=True):
        wanted = demo_pipe.generate(line.pop("prompt"), **line)
        assert token_ids(answer["sequences"]) == [each.token_ids for each in wanted.sequences]


def test_a_batch_is_answered_anew_when_its_trie_changes(demo_bundle, demo_pipe, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x = "}\n')
    file, output = tmp_path / "words.trie", tmp_path / "out.jsonl"
    arguments = [demo_bundle, "--input", tmp_path / "in.jsonl", "--output", output, "--trie", file]
    for text in ("import os", "return None"):
        TokenTrie.from_texts([text], demo_pipe.tokenizer.encode).save(file)
        done = dsbd_run(*arguments)
        if text == "import os":
            (answer,) = [json.loads(line) for line in output.read_text().splitlines()]
            assert done.exit_code == 0 and answer["sequences"][0]["text"] == text
        else:
            assert done.exit_code == 2 and "other" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--regex", "a", "--choice", "b"], "--regex and --choice contradict each other"),
        (["--json-schema", "/no/such.json"], "--json-schema /no/such.json cannot be read"),
        (["--grammar", "/no/such.lark"], "--grammar /no/such.lark cannot be read"),
        (["--trie", "/no/such.trie"], "constraint has trie '/no/such.trie', which cannot be read"),
        (["--json-schema", __file__], "is invalid JSON"),
        (["--regex", "("], "the regex '(' is not a usable grammar"),
        (["--regex", "a", "--grammar", __file__], "a request has one constraint"),
    ],
)
def test_faults_end_in_one_line(demo_bundle, arguments, words):
    assert_one_line_error(dsbd_run(demo_bundle, "--prompt", "x", *arguments), words)


def test_a_damaged_trie_ends_in_one_line(demo_bundle, tmp_path):
    file, words = tmp_path / "a.jsonl", "9223372036854775808; expect"
    file.write_text('{"token_ids": [9223372036854775808], "item": 1}')
    done = dsbd_run(demo_bundle, "--prompt", "x", "--trie", file)
    assert_one_line_error(done, words)
    assert str(file) in done.stderr
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "x"}) + "\n")
    call = ["--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", "--trie", file]
    assert_one_line_error(dsbd_run(demo_bundle, *call), words)


def test_wide_beams_print_the_items_of_a_trie(demo_bundle, demo_pipe, tmp_path):
    rows = np.random.default_rng(0).integers(4, 300, size=(2000, 3)).tolist()
    file = tmp_path / "items.jsonl"
    lines = [json.dumps({"token_ids": row, "item": {"sku": i}}) for i, row in enumerate(rows)]
    file.write_text("\n".join(lines))
    options = ["--strategy", "beam-search", "--num-beams", 64, "--num-return-sequences", 20]
    call = [demo_bundle, "--prompt", PROMPT, "--trie", file, *options]
    wanted = demo_pipe.generate(
        PROMPT,
        strategy="beam-search",
        num_beams=64,
        num_return_sequences=20,
        constraint={"trie": str(file)},
    ).sequences
    printed = dsbd_run(*call)
    assert printed.exit_code == 0, printed.stderr
    assert printed.stdout.splitlines() == [
        "\t".join([f"{s.score:.4f}", *(json.dumps(item) for item in s.items or [])]) for s in wanted
    ]
    assert all(s.items == [{"sku": rows.index(s.token_ids)}] for s in wanted)
    found = json.loads(dsbd_run(*call, "--json").stdout)
    assert [s["items"] for s in found["sequences"]] == [s.items for s in wanted]
    assert token_ids(found["sequences"]) == [s.token_ids for s in wanted]
