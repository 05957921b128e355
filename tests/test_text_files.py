"""Files of text that users give: a byte order mark is no text, and UTF-16 is named."""

import json

import pytest

from dsbd_errors import DsbdError
from dsbd_export.texts import check_readable, find_files, texts_of
from dsbd_ort.batch.prompt_lines import read_lines
from dsbd_ort.benchmark.bench_run import read_prompts
from dsbd_ort.cli import run
from dsbd_ort.constraints.trie_file import read_items, read_sequences
from dsbd_ort.openai_server.middleware import read_api_keys
from dsbd_ort.scorers import LanguageModel
from dsbd_runtime.typed_json import json_from_file
from tests.commands.calls import called

ITEM = json.dumps({"token_ids": [5, 7], "item": "é"})
ARPA = "\\data\\\nngram 1=3\n\n\\1-grams:\n-1 </s>\n-1 a\n-1 <unk>\n\n\\end\\\n"


def data_of(path):
    files = find_files((str(path),), ())
    check_readable(files)
    return [(name, [*pieces]) for file in files for name, pieces in texts_of(file)]


READERS = {  # name: (suffix, content, what a reader makes of the file)
    "lines of --input": (".jsonl", '{"prompt": "é"}', lambda path: [*read_lines(path)]),
    "prompts of dsbd-bench": (".txt", "def é\n", read_prompts),
    "objects of dsbd-bench": (".jsonl", '{"prompt": "é"}\n', read_prompts),
    "items of a trie": (".jsonl", ITEM, read_items),
    "sequences of a trie": (
        ".txt",
        "5 7\n8\n",
        lambda path: [a.tolist() for a in read_sequences(path)],
    ),
    "API keys": (".txt", "secret\n", lambda path: read_api_keys(path)._digests),
    "ARPA": (".arpa", ARPA, lambda path: LanguageModel(path)._ngrams.score((), "a")),
    "texts for training": (".txt", "é\r\n", data_of),
    "JSON for training": (".jsonl", '{"text": "é"}\n', data_of),
    "JSON of a bundle": (".json", '{"a": "é"}', json_from_file),
}


@pytest.mark.parametrize("name", READERS)
def test_a_byte_order_mark_is_no_text(name, tmp_path):
    suffix, content, read = READERS[name]
    file = tmp_path / f"file{suffix}"
    file.write_text(content, encoding="utf-8", newline="")
    expected = read(file)
    assert expected
    file.write_text(content, encoding="utf-8-sig", newline="")
    assert read(file) == expected


@pytest.mark.parametrize("name", READERS)
def test_a_pointer_of_git_lfs_is_named(name, tmp_path):
    suffix, _, read = READERS[name]
    file = tmp_path / f"file{suffix}"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(DsbdError, match="git lfs pull"):
        read(file)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", READERS)
def test_another_encoding_is_named(name, encoding, tmp_path):
    suffix, content, read = READERS[name]
    file = tmp_path / f"file{suffix}"
    file.write_text(content, encoding=encoding, newline="")
    with pytest.raises(DsbdError, match=rf"file\{suffix}.*it is {encoding[:6].upper()}; .*iconv"):
        read(file)


FILES = {  # the option of dsbd-run, and a content
    "--prompt-file": "é = 1",
    "--json-schema": '{"enum": ["é"]}',
    "--grammar": 'start: "é"',
    "--predicted-file": "é = 1",
}


@pytest.mark.parametrize("option", FILES)
def test_files_of_dsbd_run(option, tiny_bundle, tmp_path):
    if option in ("--json-schema", "--grammar"):
        pytest.importorskip("llguidance")
    arguments = [
        tiny_bundle.path,
        "--json",
        "--seed",
        1,
        "--strategy",
        "dsbd",
        "--max-new-tokens",
        4,
    ]
    arguments += [] if option == "--prompt-file" else ["--prompt", "a"]
    file, answers = tmp_path / "file", []
    for encoding in ("utf-8", "utf-8-sig"):
        file.write_text(FILES[option], encoding=encoding)
        done = called(run, *arguments, option, file)
        assert done.exit_code == 0, done.stderr
        answers.append(json.loads(done.stdout)["sequences"])
    assert answers[0] == answers[1]
    file.write_text(FILES[option], encoding="utf-16")
    done = called(run, *arguments, option, file)
    assert done.exit_code == 2 and "it is UTF-16; expected UTF-8" in done.stderr


def test_a_prompt_on_stdin(tiny_bundle):
    arguments = [tiny_bundle.path, "--json", "--strategy", "greedy", "--max-new-tokens", 4]
    plain, marked = (
        called(run, *arguments, text="é = 1".encode(encoding))
        for encoding in ("utf-8", "utf-8-sig")
    )
    assert json.loads(plain.stdout)["sequences"] == json.loads(marked.stdout)["sequences"]
    done = called(run, *arguments, text="é = 1".encode("utf-16"))
    assert done.exit_code == 2 and "the prompt on stdin" in done.stderr
    assert "it is UTF-16" in done.stderr
