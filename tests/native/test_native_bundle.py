"""Damaged manifests are refused by the native library in one line, whatever is damaged."""

import copy
import json
import random
import subprocess

import pytest

from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

VALUES = [None, True, -1, 0, 2**31, 2**70, 1.5, "", "x", [], [[]], {}, {"a": [1]}, "topk:9999999"]


class Opener:
    """bundle_test in a process of its own."""

    def __init__(self, native_build, bundle):
        self._bundle = bundle
        self._program = subprocess.Popen(
            [native_build / "tests" / "bundle_test"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",  # a message may show the damaged bytes
        )

    def open(self, manifest):
        """Return what it says of a manifest, which is bytes."""
        (self._bundle / "dsbd.json").write_bytes(manifest)
        self._program.stdin.write(f"{self._bundle}\n")
        self._program.stdin.flush()
        return self._program.stdout.readline()

    def close(self):
        self._program.stdin.close()
        assert self._program.wait(timeout=60) == 0
        self._program.stdout.close()


def places(value, path=()):
    """Yield the path of every value in JSON."""
    yield path
    if isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(entry, (*path, key))


def damaged(rng, text):
    """Return JSON in which a value is another, has gone or holds its holder; or any bytes."""
    kind = rng.randrange(4)
    if kind == 0:
        content = bytearray(text)
        for _ in range(rng.randrange(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        return bytes(content[: rng.randrange(len(content))] if rng.random() < 0.3 else content)
    manifest = json.loads(text)
    *path, last = rng.choice([path for path in places(manifest) if path])
    holder = manifest
    for key in path:
        holder = holder[key]
    if kind == 1:
        del holder[last]
    else:
        holder[last] = rng.choice(VALUES) if kind == 2 else copy.deepcopy(holder)
    return json.dumps(manifest).encode()


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.long)])
def test_no_damage_crashes(native_build, tmp_path, count):
    bundle = tmp_path / "bundle"
    write_tiny_bundle(bundle, target=TinyModel(sliding_window=5, logits="topk:8"))
    opener, rng = Opener(native_build, bundle), random.Random(0)
    text = (bundle / "dsbd.json").read_bytes()
    assert opener.open(text) == "ok\n"
    answers = [opener.open(damaged(rng, text)) for _ in range(count)]
    assert opener.open(b"[" * 100_000).strip().endswith("; make it flatter")
    assert opener.open(text) == "ok\n"
    pointer, words = b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of git LFS"
    assert words in opener.open(pointer)
    (bundle / "target" / "model.onnx.data").write_bytes(pointer)
    assert words in opener.open(text)
    assert all(answer.endswith("\n") and len(answer) < 2000 for answer in answers)
    assert count / 2 < sum(answer != "ok\n" for answer in answers) < count
    opener.close()
