"""Texts of a distillation: which files, which are held out, and which are refused."""

import itertools
import re

import numpy as np
import pytest

from dsbd_export import texts as module
from dsbd_export.chats import ChatTokens
from dsbd_export.errors import ExportError
from dsbd_export.texts import (
    check_readable,
    find_files,
    is_held_out,
    open_streams,
    windows,
    write_streams,
)
from dsbd_runtime.text.tokenizer import Tokenizer
from tests.runtime.tiny_tokenizer import tiny_tokenizer

BOS, EOS = 256, 257


@pytest.fixture
def tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    return Tokenizer(folder, bos_token_id=BOS)


@pytest.fixture
def data(tmp_path):
    for name in ("a.md", "b.txt", "sub/c.md", "sub/deep/d.md", ".hidden/e.md"):
        file = tmp_path / "data" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path / "data"


FOUND = [  # (entry after the folder, excluded, names)
    ("", (), ["a.md", "b.txt", "sub/c.md", "sub/deep/d.md"]),
    ("a.md", (), ["a.md"]),
    ("*.md", (), ["a.md"]),
    ("**/*.md", (), ["a.md", "sub/c.md", "sub/deep/d.md"]),
    ("sub/**/*.md", (), ["c.md", "deep/d.md"]),
    ("", ("*.txt", "sub/deep/*"), ["a.md", "sub/c.md"]),
    (".hidden", (), ["e.md"]),
]


def test_files_of_an_entry_and_of_two(data):
    for entry, exclude, names in FOUND:
        assert [file.name for file in find_files((str(data / entry),), exclude)] == names
    files = find_files((str(data), str(data / "a.md")), ())
    assert len(files) == len({file.path for file in files}) == 4


def test_entries_without_files_are_refused(data):
    words = "matches no file; give a file, a folder, or a pattern"
    for entry in ("nothing", "*.rst", "sub/deep/none/*"):
        with pytest.raises(ExportError, match=words):
            find_files((str(data), str(data / entry)), ())
    with pytest.raises(ExportError, match=r"exclude=\*\.md, \*\.txt leaves no file"):
        find_files((str(data),), ("*.md", "*.txt"))


def test_files_that_are_not_utf8_are_counted(data):
    (data / "b.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (data / "sub" / "c.md").write_bytes(b"\x80")
    with pytest.raises(
        ExportError, match=r"2 of 4 files of data are not UTF-8, .*b\.txt \(.*\); convert"
    ):
        check_readable(find_files((str(data),), ()))


def test_a_twentieth_is_held_out_by_the_name_alone():
    share = np.mean([is_held_out(f"folder/{number}.py") for number in range(20_000)])
    assert share == pytest.approx(13 / 256, abs=0.005)


def written(folder, tokenizer, tmp_path, eos=EOS):
    chats = ChatTokens(tmp_path / "tokenizer", tokenizer, longest=100, learns_answers=False)
    write_streams(find_files((str(folder),), ()), tokenizer, chats, eos, tmp_path / "tokens")
    return open_streams(tmp_path / "tokens")


def test_tokens_of_texts_begin_and_end_as_requests_do(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(module, "_PIECE_CHARS", 64)  # texts are encoded in several pieces
    folder = tmp_path / "data"
    folder.mkdir()
    texts = {f"{i}.txt": f"line {i}\n" * 40 + "\r\nlast" for i in range(100)}
    for name, text in texts.items():
        (folder / name).write_bytes(text.encode())
    streams = written(folder, tokenizer, tmp_path)
    for stream, held_out in ((streams.train, False), (streams.held_out, True)):
        names = [name for name in sorted(texts) if is_held_out(name) == held_out]
        expected = [[BOS, *tokenizer.encode(texts[n])[1:], EOS] for n in names]
        assert stream.tolist() == list(itertools.chain(*expected))
    assert "13 of 256 texts" in streams.split and len(streams.held_out) > 200


def test_a_single_text_holds_its_end_out(tmp_path, tokenizer):
    (tmp_path / "one.txt").write_text("x" * 10_000)
    streams = written(tmp_path / "one.txt", tokenizer, tmp_path)
    assert (len(streams.train), len(streams.held_out)) == (10_002 - 500, 500)
    assert streams.held_out[-1] == EOS and "too few to leave out whole ones" in streams.split


def test_lines_of_json(tmp_path, tokenizer):
    lines = ['"' + "a" * 3000 + '"', "", '{"text": "' + "b" * 3000 + '", "id": 1}']
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    streams = written(tmp_path / "lines.jsonl", tokenizer, tmp_path, eos=None)
    a, b = (tokenizer.encode(letter)[1] for letter in "ab")
    both = [*streams.train, *streams.held_out]
    assert both == [BOS, *[a] * 3000, BOS, *[b] * 3000]


WRONG_LINES = [
    ("{", "lines.jsonl:2 is invalid JSON"),
    ("[1]", 'lines.jsonl:2 has no text; write a string, {"text": "..."} or {"messages": [...]}'),
    ('{"prompt": "x"}', "lines.jsonl:2 has no text"),
    ('{"text": 5}', "lines.jsonl:2 has no text"),
]


@pytest.mark.parametrize(("line", "words"), WRONG_LINES)
def test_lines_that_are_no_texts_are_refused(tmp_path, tokenizer, line, words):
    (tmp_path / "lines.jsonl").write_text(f'"fine"\n{line}\n')
    with pytest.raises(ExportError, match=re.escape(words)):
        written(tmp_path / "lines.jsonl", tokenizer, tmp_path)
    assert not (tmp_path / "tokens").exists()


def test_too_few_tokens_are_refused(tmp_path, tokenizer):
    (tmp_path / "short.txt").write_text("x" * 2000)
    with pytest.raises(ExportError, match=r"data has 2002 tokens, at least 2200 are needed"):
        written(tmp_path / "short.txt", tokenizer, tmp_path)


def test_windows_lie_within_the_stream():
    stream = np.arange(100, dtype=np.uint32)
    rows = windows(stream, 1000, 10, np.random.default_rng(0))
    assert rows.shape == (1000, 10) and rows.min() == 0 and rows.max() == 99
    assert (np.diff(rows, axis=1) == 1).all()
