"""Native next-token distributions equal Python's, to the last bit, and refuse the same logits."""

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from dsbd_ort import TokenTrie
from tests.native.conftest import ROOT
from tests.native.law_cases import PORTABLE

SEAL_BYTES = 132  # of a trie's file


def run(program: Path, folder: Path) -> list[int | str]:
    printed = subprocess.run([program, folder], check=True, capture_output=True, text=True).stdout
    return json.loads(printed)


def check_laws(program: Path, folder: Path, number: int, seed: int) -> list[int | str]:
    """Hold native distributions against Python's; return the outcomes of the cases."""
    writer = [sys.executable, "-W", "ignore", "-m", "tests.native.law_cases"]
    arguments = [str(folder), str(number), str(seed)]
    subprocess.run([*writer, *arguments], check=True, cwd=ROOT, env={**os.environ, **PORTABLE})
    expected = json.loads((folder / "expected.json").read_text())
    assert run(program, folder) == expected
    found, wanted = (np.fromfile(folder / name, np.int64) for name in ("found", "expected"))
    if not np.array_equal(found, wanted):
        ends = np.cumsum([size if isinstance(size, int) else 0 for size in expected])
        case = int(np.searchsorted(ends, (found != wanted).argmax(), side="right"))
        pytest.fail(f"case {case} of {folder} has other bits")
    return expected


def test_distributions_of_tables(native_build, tmp_path):
    outcomes = check_laws(native_build / "tests/laws_test", tmp_path, 250, 1)
    assert sum(isinstance(outcome, int) for outcome in outcomes) > 150
    texts = " ".join(outcome for outcome in outcomes if isinstance(outcome, str))
    assert "without a finite largest value" in texts
    assert "leave no token to any beam" in texts


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 12))
def test_distributions_of_many_tables(native_build, tmp_path, seed):
    check_laws(native_build / "tests/laws_test", tmp_path, 1000, seed)


def outcome_of_trie(program: Path, folder: Path, content: bytes) -> int | str:
    """Return the outcome of a request under a trie of this content."""
    (folder / "bad.trie").write_bytes(content)
    case = {"options": {}, "prompt": [0], "vocab_size": 9, "num_top": 0, "keeps_full": False}
    (folder / "cases.json").write_text(json.dumps([{**case, "trie": "bad.trie"}]))
    (outcome,) = run(program, folder)
    return outcome


def sealed(content: bytes) -> bytes:
    """Return a trie's file whose checksum is right again."""
    crc = zlib.crc32(content[:-SEAL_BYTES])
    return content[:-4] + crc.to_bytes(4, "little")


def test_damaged_tries_are_refused(native_build, tmp_path):
    program = native_build / "tests/laws_test"
    TokenTrie.from_sequences([[1, 2], [1, 3], [4]]).save(tmp_path / "good.trie")
    good = (tmp_path / "good.trie").read_bytes()
    rng = np.random.default_rng(0)
    damaged = [good[:size] for size in (0, 5, 130, 140, 300, len(good) - 1)]
    for place in rng.integers(len(good), size=40):
        changed = bytearray(good)
        changed[place] ^= int(rng.integers(1, 256))
        damaged.append(bytes(changed))
    for content in damaged:
        outcome = outcome_of_trie(program, tmp_path, content)
        assert "save it again" in str(outcome), outcome
    version = good.replace(b"\x02\0\0\0\0\0\0\0", b"\x03\0\0\0\0\0\0\0", 1)
    assert "begins with" in str(outcome_of_trie(program, tmp_path, version))
    offsets = sealed(good.replace(b"\x04\0\0\0", b"\x09\0\0\0"))
    assert "do not form a trie" in str(outcome_of_trie(program, tmp_path, offsets))
