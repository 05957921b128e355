"""Engines of the native library return the bits of Python's, call by call."""

import json
import subprocess
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from dsbd_forward.features import ParentFeatures
from dsbd_forward.forward import Forward
from dsbd_forward.logits import DenseLogits
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.errors import DsbdError
from dsbd_runtime.loading import load_causal_lm
from tests.made_once import made_once
from tests.runtime.bundle_edits import as_version_2, edited, put
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

KINDS = {
    "full logits": TinyModel(),
    "sliding window": TinyModel(sliding_window=5, num_layers=4),
    "top-k head": TinyModel(logits="topk:8"),
    "top-k head alone": TinyModel(logits="topk:8", full_logits=False),
    "fp16": TinyModel(dtype="fp16"),
}
SIZES = (1, 3, 40, 100, 300, 1, 7, 600, 2)  # rows of the forwards; chunks, and growth in steps


NO_PATHS = np.zeros((0, 0), np.bool_)


def bits(array):
    return np.ascontiguousarray(array).view(np.uint32).ravel().tolist()


class NativeEngine:
    """An engine in a program of its own, as engine_test drives it."""

    def __init__(self, native_build, bundle, role, *provider, **options):
        command = [native_build / "tests" / "engine_test", bundle, role, *provider]
        self._program = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
        )

    def ask(self, **line):
        self._program.stdin.write(json.dumps(line) + "\n")
        self._program.stdin.flush()
        return json.loads(self._program.stdout.readline())

    def forward(self, forward, **line):
        mask = ["".join("01"[bit] for bit in row) for row in forward.mask.tolist()]
        arrays = {n: getattr(forward, n).tolist() for n in ("token_ids", "positions", "logit_rows")}
        given = {**arrays, "mask": mask, **line.pop("more", {})}
        return self.ask(forward=given, **line)

    def close(self):
        self._program.stdin.close()
        assert self._program.wait(timeout=60) == 0
        self._program.stdout.close()


def random_forward(rng, engine, paths, num_new):
    """Rows that each descend from a random row, mostly from the last: its path and itself.

    paths: (N, N) bool, the rows that each cache row sees.
    """
    num_rows = engine.num_rows
    mask = np.zeros((num_new, num_rows + num_new), np.bool_)
    for row in range(num_new):
        parent = int(rng.integers(-1, num_rows + row)) if rng.random() < 0.1 else num_rows + row - 1
        if parent >= num_rows:
            mask[row] = mask[parent - num_rows]
        elif parent >= 0:
            mask[row, :num_rows] = paths[parent]
        mask[row, num_rows + row] = True
    vocab_size = engine.spec.vocab_size
    return Forward(
        rng.integers(0, vocab_size, num_new),
        mask.sum(axis=1) - 1,
        mask,
        rng.integers(0, num_new, int(rng.integers(0, 2 * min(num_new, 20)))),
    )


def assert_same_logits(native, logits, answer):
    if isinstance(logits, DenseLogits):
        assert answer == {"logits": bits(logits.values)}
        return
    assert answer.pop("has_full") == (logits.full is not None)
    assert answer == {
        "top_logits": bits(logits.top_logits),
        "top_ids": logits.top_ids.ravel().tolist(),
        "logsumexp": bits(logits.logsumexp),
    }
    if logits.full is not None and len(logits.top_ids):
        row = len(logits.top_ids) - 1
        assert native.ask(full=row) == {"logits": bits(logits.full.read(np.array([row])))}


def assert_same_calls(native, engine, rng, sizes):
    """Make the same forwards and prunes with both."""
    paths = NO_PATHS
    for num_new in sizes:
        forward = random_forward(rng, engine, paths, num_new)
        answer = native.forward(forward)
        assert_same_logits(native, engine.forward(forward).logits, answer)
        paths = np.vstack([np.pad(paths, ((0, 0), (0, num_new))), forward.mask])
        kept = np.flatnonzero(paths[rng.random(engine.num_rows) < 0.1].any(axis=0))
        engine.keep(kept)
        room = {"num_rows": engine.num_rows, "num_free_rows": engine.num_free_rows}
        assert native.ask(keep=kept.tolist()) == room
        paths = paths[kept][:, kept]


def assert_same_engine(native_build, bundle, role, sizes=SIZES, seed=0):
    native = NativeEngine(native_build, bundle, role)
    settings = EngineSettings(num_threads=1)
    with load_causal_lm(open_bundle(bundle), role, settings=settings) as engine:
        assert_same_calls(native, engine, np.random.default_rng(seed), sizes)
        engine.keep(np.arange(0))
        assert native.ask(keep=[])["num_free_rows"] == engine.num_free_rows
    native.close()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_engine(native_build, tmp_path, kind):
    write_tiny_bundle(tmp_path / "bundle", target=KINDS[kind], draft=TinyModel(seed=1))
    assert_same_engine(native_build, tmp_path / "bundle", "target")


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_demo_pair(native_build, demo_bundle, int8_bundle, role):
    """An export's engines, in fp32 and in int8-dynamic; other precisions: whole requests."""
    for bundle in (demo_bundle, int8_bundle):
        assert_same_engine(native_build, bundle, role, (5, 90, 1, 4))


def test_features(native_build, feature_bundle):
    """Those of the target, and of the draft's own, read by forwards of the draft."""
    rng = np.random.default_rng(0)
    native = NativeEngine(native_build, feature_bundle.path, "both")
    kept = []
    with (
        load_causal_lm(feature_bundle, "target", settings=EngineSettings(num_threads=1)) as target,
        load_causal_lm(feature_bundle, "draft", settings=EngineSettings(num_threads=1)) as draft,
    ):
        for num_new, num_features in ((300, 290), (3, 0), (5, 4)):
            rows = np.sort(rng.choice(num_new, num_features, replace=False))
            forward = replace(random_forward(rng, target, NO_PATHS, num_new), feature_rows=rows)
            answer = native.forward(forward, role="target", more={"feature_rows": rows.tolist()})
            found = target.forward(forward)
            target.keep(np.arange(0))
            native.ask(keep=[], role="target")
            kept.append(found.features)
            assert answer == {"logits": bits(found.logits.values), "features": bits(kept[-1].array)}
        for numbers, num_new in (([0, 2], 6), ([0, 2, 3], 290), ([4, 2, 0], 1)):
            forwards = [kept[number] for number in numbers]
            sources = rng.integers(-1, 2, num_new)
            sizes = np.array([len(each) for each in forwards])
            rows = rng.integers(0, sizes[sources])
            parents = ParentFeatures(forwards, sources, rows)
            forward = replace(
                random_forward(rng, draft, NO_PATHS, num_new), parent_features=parents
            )
            named = {"forwards": numbers, "sources": sources.tolist(), "rows": rows.tolist()}
            answer = native.forward(forward, role="draft", more={"parent_features": named})
            found = draft.forward(forward)
            draft.keep(np.arange(0))
            native.ask(keep=[], role="draft")
            kept.append(found.features)
            assert answer == {"logits": bits(found.logits.values), "features": bits(kept[-1].array)}
        for wrong in ({}, {"forwards": [0], "sources": [1], "rows": [0]}):
            more = {"parent_features": wrong} if wrong else {}
            forward = random_forward(rng, draft, NO_PATHS, 1)
            assert "feature" in native.forward(forward, role="draft", more=more)["error"]
    native.close()


@pytest.fixture(scope="module")
def hybrid_bundle(captures, tmp_path_factory):
    """A gated delta rule with convolutions, drafted by a model of convolutions."""
    from tests.exports import family_pair

    name, make = family_pair("qwen3_5", "lfm2")
    return made_once(tmp_path_factory, name, partial(make, captures)) / "bundle"


@pytest.mark.parametrize("role", ["target", "draft"])
def test_recent_rows(native_build, hybrid_bundle, role):
    """Folds, branches from folded rows, which are computed again, and calls that are cut."""
    for seed in range(3):
        sizes = (120, 1, 3, 30, 5, 20, 2, 30, 4, 4, 4, 20, 5)
        assert_same_engine(native_build, hybrid_bundle, role, sizes, seed)


def test_older_manifests(native_build, tmp_path):
    model = TinyModel(logits="topk:8", full_logits=False)
    bundle = tmp_path / "bundle"
    write_tiny_bundle(bundle, target=model, draft=model)
    edited(bundle, as_version_2)
    assert_same_engine(native_build, bundle, "draft", (2, 3))


def test_wrong_forwards_are_refused_and_leave_the_engine_as_it_was(native_build, tiny_bundle):
    native = NativeEngine(native_build, tiny_bundle.path, "target")
    row = {"token_ids": [1], "positions": [0], "mask": ["1"], "logit_rows": [0]}
    expected = native.ask(forward=row)
    assert native.ask(keep=[]) == {"num_rows": 0, "num_free_rows": 128}
    for wrong, words in [
        ({"token_ids": [258]}, "token_ids[0] is 258, expected 0 to 257"),
        ({"token_ids": [-1]}, "token_ids[0] is -1, expected 0 to 257"),
        ({"positions": [2048]}, "position 2048 does not fit, the model was made for 2048"),
        ({"logit_rows": [1]}, "logit_rows[0] is 1, expected 0 to 0"),
        ({"positions": []}, "1 token ids, 0 positions"),
    ]:
        assert words in native.ask(forward={**row, **wrong})["error"]
    assert "cache row 0 is kept" in native.ask(keep=[0])["error"]
    assert native.ask(forward=row) == expected
    native.close()


DAMAGES = [
    (put(["schema_version"], 5), "schema_version is 5, expected a whole number from 2 to 4"),
    (put(["files", "../x"], {"size": 1, "sha256": ""}), "a file outside the bundle"),
    (put(["files", "/x"], {"size": 1, "sha256": ""}), "a file outside the bundle"),
    (put(["files", "x"], {"size": 1, "sha256": ""}), "x is missing"),
    (put(["target", "logits"], "topk:0"), "expected full or topk:K with K from 1 to 258"),
    (put(["target", "vocab_size"], 300), "target and draft of"),
    (put(["target", "caches", 0, "num_heads"], 3), "of type 1 and shape [1, 2, any, 8]"),
    (put(["target", "caches", 1, "layer"], 0), "expected increasing layers"),
    (put(["target", "caches", 0, "kind"], "states"), 'is "states", expected one of attention'),
    (put(["target", "masks"], ["mask"]), "expected attention_mask, attention_mask_sliding"),
    (put(["target", "masks"], ["attention_mask_sliding"]), "exactly when masks has"),
    (put(["target", "masks"], 3), "expected attention_mask"),
    (put(["target", "eos_token_ids"], [258]), "expected a whole number from 0 to 257"),
    (put(["target", "future"], 1), "does not know; use the version that made the bundle"),
    (put(["target", "encoder"], {}), "target: encoder: vocab_size is absent"),
    (put(["target", "dtype"], "bf16"), 'is "bf16", expected one of'),
    (put(["draft"], 3), "draft is 3, expected an object"),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage[1])
def test_damaged_bundles_are_refused(native_build, tmp_path, damage):
    """By Python as well, except for what the native library alone does not run."""
    edit, words = damage
    write_tiny_bundle(tmp_path / "bundle", target=TinyModel(), draft=TinyModel(seed=1))
    edited(tmp_path / "bundle", edit)
    command = [native_build / "tests" / "engine_test", tmp_path / "bundle", "target"]
    done = subprocess.run(command, capture_output=True, text=True, input="", timeout=60)
    assert done.returncode == 2 and words in json.loads(done.stdout)["error"]
    with pytest.raises(DsbdError):
        load_causal_lm(open_bundle(tmp_path / "bundle"), "target")


def test_links_out_of_a_bundle_are_refused(native_build, tmp_path):
    write_tiny_bundle(tmp_path / "bundle")
    (tmp_path / "bundle" / "more").symlink_to(tmp_path)
    command = [native_build / "tests" / "engine_test", tmp_path / "bundle", "target"]
    done = subprocess.run(command, capture_output=True, text=True, input="", timeout=60)
    assert done.returncode == 2 and "is a link out of the bundle" in done.stdout
