"""The host in C++ without ONNX Runtime: its noise and its loop over tables are Python's."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dsbd_ort import TokenTrie
from dsbd_ort.decoding import DecodingConfig, TableModel, decode
from dsbd_ort.decoding.noise import child_key, gumbel_noise, mix64, root_key
from dsbd_runtime.parts.kv_cache import bucket_capacity
from tests.examples.cpp_requests import arguments_of, of_python
from tests.made_once import made_once

HOST = Path(__file__).parents[2] / "examples" / "cpp"
SOURCES = Path(__file__).parent / "cpp"
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-g"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

SEEDS = [0, 1, 42, 2**32 - 1, 2**32, 2**63 + 5, 2**64 - 1]
TABLE_REQUESTS = [
    {"num_beams": 4, "max_new_tokens": 60},  # long enough for rows to be dropped
    {"num_beams": 2, "draft_length": 3, "draft_beams": [5, 3, 2], "temperature": 0.7},
    {"num_beams": 5, "draft_length": 2, "draft_beams": 8, "top_k": 3},
    {"num_beams": 4, "top_k": 1},  # fewer candidates than beams
    {"num_beams": 3, "top_p": 0.6, "temperature": 1.5},
    {"strategy": "beam-sample", "num_beams": 3, "top_k": 6, "max_new_tokens": 30},
    {"strategy": "speculative", "draft_length": 6},
    {"strategy": "tree-speculative", "top_p": 0.9},
    {"strategy": "sample"},
    {"strategy": "speculative-beam-search", "num_beams": 1, "draft_beams": 2},
    {"strategy": "greedy", "eos_token_id": 15, "max_new_tokens": 80},
]


def compiled(source, folder):
    """Return the program of a test, compiled with sanitizers; it needs no ONNX Runtime."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    program = folder / Path(source).stem
    command = [compiler, *FLAGS, *SANITIZERS, "-I", HOST, SOURCES / source, "-o", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="session")
def table_host(tmp_path_factory):
    """The loop over tables, which compiles for ten seconds."""

    def make(folder):
        folder.mkdir()
        compiled("table_host.cpp", folder)
        return folder

    return made_once(tmp_path_factory, "table_host", make) / "table_host"


def test_noise_and_capacities_are_those_of_python(tmp_path):
    program = compiled("known_answers.cpp", tmp_path)
    output = subprocess.run([program, *map(str, SEEDS)], capture_output=True, text=True, check=True)
    *answers, capacities = output.stdout.splitlines()
    for seed, answer in zip(SEEDS, answers, strict=True):
        key, stayed, noise = answer.split()
        assert int(key) == np.random.default_rng(seed).integers(2**63)
        assert int(stayed) == child_key(child_key(root_key(int(key)), 7), -1)
        expected = gumbel_noise(np.array([int(stayed)], np.uint64), 3)[0]
        assert float(noise) == pytest.approx(expected, rel=1e-14)
    assert list(map(int, capacities.split())) == [bucket_capacity(rows) for rows in range(5000)]


def table(is_draft):
    """Return the model of table_host.cpp."""

    def logits_of(path):
        key = 0
        for token in path:
            key = child_key(key, token)
        own, added = (
            mix64(np.array([k], np.uint64), np.arange(16)) >> 40 for k in (key, ~key % 2**64)
        )
        return (own + (added / 4 if is_draft else 0.0)) * 2.0**-21

    return TableModel(16, logits_of)


def test_the_loop_is_that_of_python_over_tables(table_host):
    check_requests(TABLE_REQUESTS, table_host)


def test_a_trie_is_that_of_python_over_tables(table_host, tmp_path):
    rng = np.random.default_rng(0)
    sequences = [rng.integers(2, 16, rng.integers(1, 7)).tolist() for _ in range(60)]
    requests = []
    for end in ("leaf", "eos"):
        file = tmp_path / f"{end}.trie"
        TokenTrie.from_sequences(sequences, end=end).save(file)
        requests += [{**options, "trie": str(file)} for options in TABLE_REQUESTS]
    check_requests(requests, table_host)


def test_a_trie_that_cannot_be_used_is_refused(table_host, tmp_path):
    wide, cut, flipped = (tmp_path / f"{name}.trie" for name in ("wide", "cut", "flipped"))
    TokenTrie.from_sequences([[3, 16]]).save(wide)
    whole = wide.read_bytes()
    cut.write_bytes(whole[:-1])
    last = whole.rindex(b"\x10\0\0\0")  # the token id 16
    flipped.write_bytes(whole[:last] + b"\x0f" + whole[last + 1 :])
    for file, words in (
        (wide, "has the token id 16; expected 0 to 15"),
        (cut, "is no saved trie, or not whole"),
        (flipped, "is no saved trie, or not whole"),
        (tmp_path / "none", "cannot read"),
    ):
        done = subprocess.run(
            [table_host], input=f"--ids 3 --trie {file}\n", capture_output=True, text=True
        )
        assert done.returncode != 0 and words in done.stderr


def check_requests(all_options, table_host):
    """Compare the sequences and the calls of requests with those of Python."""
    requests = [
        {"max_new_tokens": 12, "eos_token_id": 1, **options, "seed": seed}
        for options in all_options
        for seed in SEEDS
    ]
    lines = [" ".join(["--ids", "3,4,5", *arguments_of(options)]) for options in requests]
    done = subprocess.run([table_host], input="\n".join(lines), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = done.stdout.split("\n\n")[:-1]
    for options, answer in zip(requests, answers, strict=True):
        config = DecodingConfig(**of_python(options))
        rng = np.random.default_rng(config.seed)
        expected = decode(table(False), table(True), [3, 4, 5], config, rng)
        *sequences, calls = answer.splitlines()
        for line, sequence in zip(sequences, expected.sequences, strict=True):
            *token_ids, logprob = line.split()
            assert list(map(int, token_ids)) == sequence.token_ids, options
            assert float(logprob) == pytest.approx(sequence.logprob, rel=1e-5)
        stats = expected.stats
        if "trie" in options:  # whose forced tokens Python drafts without a call
            continue
        assert calls == f"{stats.target_calls} {stats.draft_calls}", options
