"""Engines with features: what a target returns, what a feature draft makes of it."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsbd_forward.features import ParentFeatures
from dsbd_ort.decoding.drafting.cost_curve import MEASURED_ROWS, measure_costs
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.loading import load_pair
from dsbd_runtime.ort.ort_session import OrtSession
from dsbd_runtime.parts.feature.feature_memory import HostFeatures, Piece, host_rows
from dsbd_runtime.parts.feature.features import FeatureEntry
from tests.runtime.bundle_edits import edited
from tests.runtime.feature_pair import (
    DRAFT,
    TARGET,
    features_of_target,
    in_dtype,
    input_of_target,
    of_draft,
)
from tests.runtime.model_calls import (
    ONE_THREAD,
    ancestor_mask,
    chain,
    logits_and_features,
    logits_of,
    opened_in,
    reference_logits,
)
from tests.runtime.tiny_graph import TinyModel, write_engine

NONE = np.arange(0)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_target_returns_what_enters_its_layers(tmp_path, dtype):
    model = in_dtype(dtype)[0]
    target = opened_in(tmp_path, model)
    assert (target.spec.returns_features, target.spec.reads_features) == (True, False)
    inputs = chain(5)
    logits, features = logits_and_features(
        target, *inputs, np.array([4]), feature_rows=np.array([0, 2, 4])
    )
    expected = features_of_target(model, *inputs)
    atol = 1e-5 if dtype == "fp32" else 0.03
    np.testing.assert_allclose(features.array, expected[[0, 2, 4]], atol=atol)
    np.testing.assert_allclose(logits, reference_logits(model, *inputs)[[4]], atol=3 * atol)
    assert (features.role, len(features), str(features.array.dtype)) == (
        "target", 3, "float32" if dtype == "fp32" else "float16",
    )  # fmt: skip
    later = chain(2, first=5)
    _, none = logits_and_features(target, *later, NONE, feature_rows=NONE)
    assert len(none) == 0
    plain = logits_of(target, *chain(1, first=7), np.array([0]))
    np.testing.assert_allclose(plain, reference_logits(model, *chain(8))[[7]], atol=3 * atol)
    np.testing.assert_allclose(features.array, expected[[0, 2, 4]], atol=atol)  # still its own


def test_a_draft_computes_rows_from_features_of_either_engine(tmp_path):
    target, draft = opened_in(tmp_path, TARGET), opened_in(tmp_path, DRAFT)
    assert (draft.spec.returns_features, draft.spec.reads_features) == (False, True)
    prompt = chain(4)
    _, of_target = logits_and_features(target, *prompt, NONE, feature_rows=np.arange(4))
    parents = ParentFeatures((of_target,), np.array([-1, 0, 0, 0]), np.array([0, 0, 1, 2]))
    logits, own = logits_and_features(draft, *prompt, np.array([0, 3]), parent_features=parents)
    # Two nodes below the last: one comes from the target's feature of row 3, one from the own.
    nodes = np.array([9, 8]), np.array([4, 4]), np.array([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 1]]) > 0  # fmt: skip # noqa: E501
    below = ParentFeatures((own, of_target), np.array([1, 0]), np.array([3, 3]))
    below_logits, below_own = logits_and_features(
        draft, *nodes, np.arange(2), parent_features=below
    )

    made = input_of_target(DRAFT, features_of_target(TARGET, *prompt))
    inputs = np.concatenate([np.zeros((1, DRAFT.width)), made[:3]])
    wanted, wanted_own = of_draft(DRAFT, *prompt, inputs)
    np.testing.assert_allclose(logits, wanted[[0, 3]], atol=3e-5)
    np.testing.assert_allclose(own.array, wanted_own, atol=3e-5)
    all_ids, all_positions = np.append(prompt[0], nodes[0]), np.append(prompt[1], nodes[1])
    mask = ancestor_mask([-1, 0, 1, 2, 3, 3])
    all_inputs = np.concatenate([inputs, made[3:4], wanted_own[3:4]])
    wanted, wanted_own = of_draft(DRAFT, all_ids, all_positions, mask, all_inputs)
    np.testing.assert_allclose(below_logits, wanted[4:], atol=3e-5)
    np.testing.assert_allclose(below_own.array, wanted_own[4:], atol=3e-5)


@pytest.mark.parametrize("logits", ["full", "topk:5"])
def test_a_long_forward_is_many_short_ones(tmp_path, logits):
    """600 rows run in calls of 256: features are one array, and every row finds its parent's."""
    target = opened_in(tmp_path, TARGET)
    draft = opened_in(tmp_path, replace(DRAFT, logits=logits))
    ids, positions, mask = chain(600)
    kept = np.arange(3, 600, 2)
    _, features = logits_and_features(target, ids, positions, mask, NONE, feature_rows=kept)
    expected = features_of_target(TARGET, ids, positions, mask)
    np.testing.assert_allclose(features.array, expected[kept], atol=1e-4)
    rows = np.arange(600) % len(kept)
    parents = ParentFeatures((features,), np.where(np.arange(600) % 5, 0, -1), rows)
    _, own = logits_and_features(
        draft, ids, positions, mask, np.array([5, 300, 599]), parent_features=parents
    )
    made = input_of_target(DRAFT, features.array[rows]) * (parents.sources >= 0)[:, None]
    _, wanted = of_draft(DRAFT, ids, positions, mask, made)
    np.testing.assert_allclose(own.array, wanted, atol=1e-4)


def test_features_on_the_host_are_read_without_a_copy():
    features = HostFeatures("target", np.arange(12.0, dtype=np.float32).reshape(6, 2))
    rows = host_rows([Piece(features, np.array([2, 3, 4]))], 2, np.float32)
    assert np.shares_memory(rows, features.array) and rows.tolist() == [[4, 5], [6, 7], [8, 9]]
    mixed = [Piece(features, np.array([5, 0])), Piece(features, np.array([1]))]
    assert host_rows(mixed, 2, np.float32).tolist() == [[10, 11], [0, 1], [2, 3]]
    assert host_rows([], 2, np.float32).shape == (0, 2)
    assert not np.shares_memory(features.copied(1).array, features.array)


REFUSED = [  # (sources, rows, what is said)
    ([0], [0], r"parents.sources has shape \(1,\)"),
    ([0, 1], [0, 0], "the parent of row 1 has its feature in row 0 of forward 1, expected one of"),
    ([0, -2], [0, 0], "row 0 of forward -2"),
    ([0, 0], [3, -1], "the parent of row 0 has its feature in row 3 .* with .3. rows"),
    ([-1, 0], [9, -1], "the parent of row 1 has its feature in row -1"),
]


@pytest.mark.parametrize(("sources", "rows", "said"), REFUSED)
def test_features_that_are_not_there_are_refused(tmp_path, sources, rows, said):
    target, draft = opened_in(tmp_path, TARGET), opened_in(tmp_path, DRAFT)
    _, features = logits_and_features(target, *chain(3), NONE, feature_rows=np.arange(3))
    parents = ParentFeatures((features,), np.array(sources), np.array(rows))
    with pytest.raises(InputError, match=said):
        logits_and_features(draft, *chain(2), NONE, parent_features=parents)
    assert draft.num_rows == 0


def test_every_engine_says_which_call_it_takes(tmp_path):
    target, draft = opened_in(tmp_path, TARGET), opened_in(tmp_path, DRAFT)
    plain = opened_in(tmp_path, TinyModel(logits="topk:3"))
    parents = ParentFeatures((), np.array([-1]), np.array([0]))
    other = ParentFeatures((object(),), np.array([0]), np.array([0]))
    refused = [  # (engine, fields of a forward of a row, what is said)
        (draft, {}, "give the forward parent_features"),
        (plain, {"feature_rows": NONE}, "export the bundle with dsbd-export --features"),
        (target, {"parent_features": parents}, "no feature draft's; leave them out"),
        (draft, {"parent_features": parents, "feature_rows": NONE}, "of all rows; leave them out"),
        (draft, {"parent_features": other}, "are object, this engine reads HostFeatures; run targ"),
        *((target, {"feature_rows": np.array(r)}, "feature_rows") for r in ([0, 0], [1], [-1])),
    ]
    for engine, fields, said in refused:
        with pytest.raises(InputError, match=said):
            logits_and_features(engine, *chain(1), NONE, **fields)
    with pytest.raises(InputError, match="feature_rows"):
        logits_and_features(target, *chain(3), NONE, feature_rows=np.array([1, 0]))


def test_manifest_and_graph_must_agree(tmp_path):
    write_engine(TARGET, tmp_path / "target.onnx")
    write_engine(DRAFT, tmp_path / "draft.onnx")
    with pytest.raises(BundleError, match="has an input feature_rows that the manifest excludes"):
        OrtSession(tmp_path / "target.onnx", replace(TARGET, features=None).entry())
    with pytest.raises(BundleError, match="lacks the input feature_rows"):
        OrtSession(tmp_path / "draft.onnx", TARGET.entry())
    wide = replace(DRAFT, features=FeatureEntry(width=5, own_width=DRAFT.width))
    with pytest.raises(BundleError, match=r"target_features of shape .*expected \[None, 5\]"):
        OrtSession(tmp_path / "draft.onnx", wide.entry())


WRONG = [  # (role, features, what is said)
    ("target", None, "features have width 64, but those of the target are null; export target and"),
    ("target", {"width": 96, "layers": [0, 1]}, "width 64, but those of the target are of width 9"),
    ("target", {"width": 64, "layers": [0, 4]}, "layers from 0 to 3"),
    ("target", {"width": 64, "layers": [1, 1]}, "is [1, 1], expected different layers"),
    ("target", {"width": 64, "layers": []}, "is [], expected different layers from 0 to 3"),
    ("target", {"width": 64}, "is None, expected different layers from 0 to 3"),
    ("target", {"width": 63, "layers": [0, 1]}, "is 63, expected a width for each layer"),
    ("target", {"width": 0, "layers": [0]}, "is 0, expected a width for each layer"),
    ("target", {"width": 64, "layers": [0, 1], "own_width": 8}, "null own_width: it is a draft's"),
    ("target", {"layers": [0]}, "missing or unknown entries ['width']"),
    ("target", {"width": "64", "layers": [0]}, "width is '64', expected int"),
    ("target", [64], "features is [64], expected"),
    ("draft", {"width": 64}, "expected own_width above 0, and null layers"),
    ("draft", {"width": 64, "own_width": 0}, "expected own_width above 0"),
    ("draft", {"width": 64, "own_width": 32, "layers": [1]}, "null layers: they are the target's"),
    ("draft", {"width": 10**12, "own_width": 32}, "width 1000000000000, but those of the target"),
]


@pytest.mark.parametrize(("role", "features", "said"), WRONG)
def test_features_that_do_not_fit_are_refused(feature_bundle, tmp_path, role, features, said):
    folder = Path(shutil.copytree(feature_bundle.path, tmp_path / "copy"))
    edited(folder, lambda data: data[role].update(features=features))
    with pytest.raises(BundleError) as caught:
        open_bundle(folder)
    message = str(caught.value)
    assert said in message and "\n" not in message and len(message) < 500


def test_costs_of_a_feature_draft_can_be_measured(feature_bundle):
    target, draft = load_pair(feature_bundle, settings=ONE_THREAD)
    ticks = itertools.count()
    with target, draft:
        costs = measure_costs(target, draft, lambda: float(next(ticks)))
    assert costs.target.seconds == costs.draft.seconds == (1.0,) * len(MEASURED_ROWS)
    assert target.num_rows == draft.num_rows == 0
