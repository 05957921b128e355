"""Ids, texts and streams of the native tokenizer: Python's, or refused by name."""

import copy
import json
import random
import subprocess
from base64 import b64decode
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from dsbd_export.gate.text_checks import write_text_checks
from dsbd_export.tokenizers.older_tokenizers import sentencepiece_content, write_source_tokenizer
from dsbd_export.tokenizers.tokenizer_gate import PLAIN_TEXTS
from dsbd_runtime.bundle_files.bundle import SOURCE_TOKENIZER_FILE, TOKENIZER_FILE
from dsbd_runtime.errors import InputError
from dsbd_runtime.text import tokenizer as python
from dsbd_runtime.text.stream_decoder import StreamDecoder, TextWindow
from tests.export.test_marian_tokenizer import SOURCES, pieces_of, with_marian_files
from tests.native.text_command import ALL_KINDS, ask, command_in, content_of, written
from tests.tokenizer_corpus import LLAMA_3_WORDS, byte_level_model, random_texts

LIKE_GPT_1 = "word_ends"  # its suffix of words is refused
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="session")
def command(native_build):
    return command_in(native_build)


def any_text(rng: random.Random) -> str:
    ranges = ((1, 0xD800), (0xE000, 0x110000), (32, 127), (32, 127), (0x80, 0x700))
    return "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(1, 30)))


def streamed(tokenizer, ids, after):
    decoder = StreamDecoder(TextWindow.after(tokenizer, ids[:after]))
    return [*(decoder.push([token]) for token in ids[after:]), decoder.finish()]


def check_kind(command, kind, folder, count):
    """Compare ids, texts and pieces over ``count`` texts of each sort."""
    folder, rng = written(kind, folder), random.Random(count)
    tokenizer = python.Tokenizer(folder, bos_token_id=None)
    special = [tokenizer.piece(token) for token in sorted(tokenizer.special_token_ids)]
    texts = [*PLAIN_TEXTS, *random_texts(count, tokens=special)]
    texts += [any_text(rng) for _ in range(count)]
    encoded = [tokenizer.encode(text) for text in texts]
    size = tokenizer.vocab_size
    for _ in range(count):  # any tokens, unknown ones among them
        encoded.append([rng.randrange(size + 2) for _ in range(rng.randrange(1, 12))])
    requests, wanted = [], []
    if kind != LIKE_GPT_1:
        for add in (True, False):
            requests += [{"encode": text, "special": add} for text in texts]
            wanted += [tokenizer.encode(text, add_special_tokens=add) for text in texts]
    for ids in encoded:
        after = rng.randrange(len(ids) + 1)
        try:
            wanted += [tokenizer.decode(ids), streamed(tokenizer, ids, after)]
            wanted.append(tokenizer.with_special_tokens.decode(ids))
        except InputError:  # Strip of more characters than there are panics
            del wanted[len(requests) :]
            continue
        requests += [{"decode": ids}, {"stream": ids, "after": after}]
        requests.append({"decode": ids, "special": True})
    for request, right, said in zip(requests, wanted, ask(command, folder, requests), strict=True):
        assert said == right, request


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_kind_is_python_s(command, kind, tmp_path):
    check_kind(command, kind, tmp_path, 25)


@pytest.mark.long
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_kind_is_python_s_over_many_texts(command, kind, tmp_path):
    check_kind(command, kind, tmp_path, 2000)


def bytes_after(*steps):
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*steps, last])


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


WORDS = {
    "llama_3": bytes_after(split(LLAMA_3_WORDS)),
    "o200k": bytes_after(split(O200K)),
    "deepseek_v3": bytes_after(
        split(r"\p{N}{1,3}"), split("[一-龥\u3040-\u30ff]+"), split(DEEPSEEK_V3)
    ),
    "others": bytes_after(split(r"\P{L}+|\D+", "removed", True), pre_tokenizers.Digits(True)),
    "merged": bytes_after(
        split(r"\s", "merged_with_next"),
        split(r"\p{P}", "merged_with_previous"),
        split(r"\p{S}|\d", "contiguous"),
    ),
    "bert": bytes_after(pre_tokenizers.BertPreTokenizer()),
    "prefix": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "falcon": bytes_after(
        pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.Digits(), split("[0-9][0-9][0-9]")
    ),
}
NORMALIZERS = {
    "NFC": normalizers.NFC(),
    "NFD without accents": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    "NFKC in lower case": normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
    "NFKD": normalizers.NFKD(),
    "BERT": normalizers.BertNormalizer(),
    "stripped": normalizers.Sequence(
        [normalizers.Strip(), normalizers.Replace(Regex(r"\p{M}"), "-")]
    ),
}


def byte_level(pre_tokenizer, normalizer=None):
    model = byte_level_model()
    merges = [(first, second) for first, second in model["merges"]]
    backend = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges))
    backend.pre_tokenizer = pre_tokenizer
    backend.normalizer = normalizer
    backend.add_tokens(
        [
            AddedToken("xq", single_word=True),
            AddedToken("XZ", lstrip=True, rstrip=True, normalized=False),
            AddedToken("WV", normalized=True),
        ]
    )
    return backend


def check_characters(command, folder, backend, step, more_forms=()):
    """Compare the ids of texts that have every ``step``-th character, next to others."""
    rng = random.Random(step)
    codes = [c for c in range(1, 0x110000, step) if not 0xD800 <= c < 0xE000]
    forms = ("b%sb", "xq%s", "%sxq", " XZ%sxq", "wv%sWV", "1%s", "%sA", "'%s", *more_forms)
    texts = [
        " ".join(rng.choice(forms) % chr(code) for code in codes[first : first + 64])
        for first in range(0, len(codes), 64)
    ]
    texts += ["".join(chr(rng.choice(codes)) for _ in range(30)) for _ in range(200)]
    texts += [
        "a'S b'\u017ft c'T D'Ll 'K",
        "x  \u180e  y",
        "İstanbul ΑΣ",
        "\u0958\u212b ﬃ",
        "  " * 50,
    ]
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    answers = ask(command, folder, [{"encode": text} for text in texts])
    for text, said, right in zip(texts, answers, backend.encode_batch(texts), strict=True):
        assert said == right.ids, text


@pytest.mark.parametrize("step", [1009, pytest.param(1, marks=pytest.mark.long)])
def test_characters_are_classified_as_in_the_library(command, tmp_path, step):
    for words in WORDS.values():
        check_characters(command, tmp_path, byte_level(words), step)


@pytest.mark.parametrize("step", [1009, pytest.param(1, marks=pytest.mark.long)])
def test_texts_are_normalized_as_in_the_library(command, tmp_path, step):
    for normalizer in NORMALIZERS.values():
        backend = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer)
        check_characters(command, tmp_path, backend, step)


# Clusters of characters that a table of sentencepiece changes as one, or drops the end of.
CLUSTERS = ("\u00a0%s", "%s\u0301", "\u0600%s", "\r%s", "\u200d%s", "%s\u200d", "%s\u00b4")


@pytest.mark.parametrize("step", [101, pytest.param(1, marks=pytest.mark.long)])
def test_tables_of_sentencepiece_are_read_as_in_the_library(command, tmp_path, step):
    pieces_of(tmp_path / "tokenizer.model", SOURCES)
    found = sentencepiece_content(tmp_path / "tokenizer.model")["normalizer"]["normalizers"][0]
    table = normalizers.Precompiled(b64decode(found["precompiled_charsmap"]))
    backend = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), table)
    assert table.normalize_str("ﬁ\u00a0\r\n²") == "fi  2"
    check_characters(command, tmp_path / "own", backend, step, CLUSTERS * 2)


REFUSED = [  # (place, value, words of the refusal)
    (["model", "dropout"], 0.1, "model: dropout is 0.1"),
    (["model", "later"], 1, "model: later is 1, expected no such field"),
    (["later"], {}, "tokenizer.json: later is"),
    (["normalizer"], {"type": "Later"}, 'normalizer: type is "Later"'),
    (["normalizer"], {"type": "Precompiled", "precompiled_charsmap": ""}, 'charsmap is ""'),
    (["normalizer"], {"type": "Precompiled", "precompiled_charsmap": "////AAAA"}, "charsmap is"),
    (["normalizer"], {"type": "Precompiled", "precompiled_charsmap": "AAAA?"}, "charsmap is"),
    (["normalizer"], {"type": "NFC", "more": 1}, "normalizer: more is 1"),
    (["pre_tokenizer"], {"type": "UnicodeScripts"}, 'is "UnicodeScripts"'),
    (["post_processor"], {"type": "Later"}, 'post_processor: type is "Later"'),
    (["version"], "2.0", 'version is "2.0"'),
    (["model", "merges"], [["a", "none"]], "merges is"),
]
PATTERNS = (
    r"\w+|\bx|(?i)x|(?i:fi)|a{2}+|[a&&b]|\p{Han}|[[:alpha:]]|(a)\1|(?<name>a)|[^\S\n]|\X|(|(?i:\u00e9)"
).split("|")


def changed(folder: Path, place, value) -> Path:
    written("gpt_2", folder)
    content = json.loads(content_of("gpt_2"))
    entry = content
    for name in place[:-1]:
        entry = entry[name]
    entry[place[-1]] = value
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(("place", "value", "words"), REFUSED)
def test_what_is_not_understood_is_named(command, tmp_path, place, value, words):
    requests = [{"encode": "a"}, {"decode": [64, 65]}]
    refused, text = ask(command, changed(tmp_path, place, value), requests)
    assert words in refused["error"] and "\n" not in refused["error"]
    assert text == python.Tokenizer(written("gpt_2", tmp_path), bos_token_id=None).decode([64, 65])


def test_regular_expressions_that_may_differ_are_refused(command, tmp_path):
    for pattern in PATTERNS:
        step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        step["invert"] = False
        (said,) = ask(command, changed(tmp_path, ["pre_tokenizer"], step), [{"encode": "a"}])
        assert "regular expression" in said["error"], pattern


def test_wrong_requests_are_answered(command, tmp_path):
    folder = written("gpt_2", tmp_path)
    requests = [{"encode": 5}, {"decode": "a"}, {"stream": 1}, {}, {"decode": [-1, 2**40]}]
    *refused, text = ask(command, folder, requests)
    assert all("expected" in said["error"] for said in refused) and text == ""
    lines = '{"encode": "\\ud800"}\n[\n{"encode": "\xff"}\n' + "[" * 9**6 + "\n"
    done = subprocess.run([command, folder], input=lines.encode("latin-1"), capture_output=True)
    assert done.returncode == 0 and done.stdout.count(b'{"error":') == 4


def mutated(content: str, rng: random.Random) -> bytes:
    """Return a tokenizer.json with a few changes: of values in its JSON, or of its bytes."""
    if rng.random() < 0.4:
        raw = bytearray(content.encode())
        for _ in range(rng.randrange(1, 8)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return bytes(raw[: rng.randrange(len(raw))] if rng.random() < 0.2 else raw)
    root = json.loads(content)
    odd = [
        None,
        -1,
        2**31,
        2**63,
        1e300,
        "",
        "\0",
        "é" * 300,
        [],
        {},
        [[]],
        True,
        "<0x41>",
        "Sequence",
    ]
    for _ in range(rng.randrange(1, 4)):
        entry = root
        while entry and isinstance(entry, dict | list):
            key = rng.choice(list(entry) if isinstance(entry, dict) else range(len(entry)))
            if not isinstance(entry[key], dict | list) or rng.random() < 0.3:
                entry[key] = copy.deepcopy(
                    rng.choice([*odd, root.get("decoder"), root.get("normalizer")])
                )
                break
            entry = entry[key]
    return json.dumps(root).encode()


@pytest.mark.parametrize("count", [25, pytest.param(2000, marks=pytest.mark.long)])
def test_a_damaged_file_never_crashes(command, tmp_path, count):
    rng = random.Random(count)
    requests = [{"encode": text} for text in PLAIN_TEXTS]
    requests += [{"decode": [1, 2, 300]}, {"stream": [1, 2, 3, 4], "after": 1}]
    requests.append({"source": ">>deu<< The house"})
    lines = "".join(f"{json.dumps(request)}\n" for request in requests).encode()
    write_source_tokenizer(with_marian_files(tmp_path / "marian"), tmp_path, 300, SOURCES)
    of_sources = (tmp_path / SOURCE_TOKENIZER_FILE).read_text()
    kinds = ("llama_3", "llama_2", "word_piece", "unigram")
    for content in (*map(content_of, kinds), of_sources):
        for _ in range(count):
            damaged = mutated(content, rng)
            for name in (TOKENIZER_FILE, SOURCE_TOKENIZER_FILE):
                (tmp_path / name).write_bytes(damaged)
            done = subprocess.run([command, tmp_path], input=lines, capture_output=True, timeout=60)
            assert done.returncode in (0, 1), (tmp_path, done.stderr)
            assert done.returncode or done.stdout.count(b"\n") == len(requests)


def test_the_checks_say_what_holds(command, tmp_path):
    def checked(folder):
        write_text_checks(folder, None)
        (found,) = ask(command, folder, [{"check": True}])
        return found

    found = checked(written("llama_2", tmp_path))
    assert (found["encodes"], found["decodes"], found["renders"]) == (True, True, False)
    assert found["reason"] == "the checkpoint has no chat template"
    (tmp_path / SOURCE_TOKENIZER_FILE).write_text(content_of(LIKE_GPT_1))
    of_sources = checked(tmp_path)
    assert (of_sources["encodes"], of_sources["decodes"]) == (False, True)
    assert f"{SOURCE_TOKENIZER_FILE}: model: end_of_word_suffix" in of_sources["reason"]
    (tmp_path / SOURCE_TOKENIZER_FILE).unlink()
    refused = checked(written(LIKE_GPT_1, tmp_path))
    assert (refused["encodes"], refused["decodes"]) == (False, True)
    assert "end_of_word_suffix" in refused["reason"]
