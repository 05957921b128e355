"""Opening a bundle: a good one opens, each kind of damage is one line that says what to do."""

import json
from dataclasses import replace
from functools import partial

import pytest

from dsbd_runtime.bundle_files.bundle import open_bundle, write_manifest
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.loading import load_causal_lm, load_pair
from tests.runtime.bundle_edits import GONE, as_version_2, as_version_3, edited, put, without_draft
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle


def refusal(folder, *, verify=False):
    with pytest.raises(BundleError) as caught:
        open_bundle(folder, verify=verify)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def test_a_good_bundle_opens(tiny_bundle):
    bundle = open_bundle(str(tiny_bundle.path), verify=True)
    assert bundle == tiny_bundle
    assert bundle.entry("target") == TinyModel().entry()
    assert bundle.model_path("draft") == bundle.path / "draft" / "model.onnx"
    assert bundle.prune_path("target") == bundle.path / "target" / "prune.onnx"
    assert sorted(bundle.manifest.files) == [
        "draft/model.onnx",
        "draft/model.onnx.data",
        "draft/prune.onnx",
        "target/model.onnx",
        "target/model.onnx.data",
        "target/prune.onnx",
        "tokenizer.json",
    ]


def test_an_unknown_role_is_refused(tiny_bundle):
    load = partial(load_causal_lm, tiny_bundle)
    for ask in (tiny_bundle.entry, tiny_bundle.model_path, tiny_bundle.prune_path, load):
        with pytest.raises(InputError, match="no model 'drafts'; ask for one of target, draft"):
            ask("drafts")


def test_what_is_no_bundle(tmp_path):
    (tmp_path / "file").write_text("hello")
    assert "no such folder; make one with dsbd-export" in refusal(tmp_path / "nowhere")
    assert "no such folder" in refusal(tmp_path / "file")
    assert f"{tmp_path} is not a bundle: it has no dsbd.json" in refusal(tmp_path)


NOT_JSON = [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": ' * 100_000, b"9" * 10_000]


@pytest.mark.parametrize("content", NOT_JSON, ids=lambda content: repr(content[:8]))
def test_a_manifest_that_is_no_json(bundle_copy, content):
    (bundle_copy / "dsbd.json").write_bytes(content)
    assert "dsbd.json cannot be read as JSON" in refusal(bundle_copy)


@pytest.mark.parametrize("version", [5, 1, None, "3", 3.0, "2", True, [1], {"a": "b" * 1000}])
def test_another_schema_version(bundle_copy, version):
    edited(bundle_copy, lambda data: data.update(schema_version=version))
    message = refusal(bundle_copy)
    assert f"has schema_version {version!r}"[:60] in message
    assert "this version reads 4, 3 and 2; export the bundle again" in message
    if version is None:
        for content in ("[]", "3", "null", '"text"', "{}"):
            (bundle_copy / "dsbd.json").write_text(content)
            assert refusal(bundle_copy) == message


WRONG_VALUES = [
    # where in the manifest, what stands there, what is said of it
    (["target"], [], "target is [], expected an object (family, vocab_size, bos_token_id, ...)"),
    (["target", "vocab_size"], "258", "target: vocab_size is '258', expected int"),
    (["target", "vocab_size"], True, "target: vocab_size is True, expected int"),
    (["draft", "vocab_size"], 0, "draft: vocab_size is 0, expected a number above 0"),
    (["target", "bos_token_id"], 258, "a special token id is 258, expected 0 to 257"),
    (["target", "eos_token_ids"], [257, None], "eos_token_ids[1] is None, expected int"),
    (["target", "eos_token_ids"], [-1], "a special token id is -1, expected 0 to 257"),
    (["target", "caches"], [], "caches is [], expected increasing layers from 0 to 1, at least"),
    (["target", "num_layers"], 0, "num_layers is 0, expected a number above 0"),
    (["target", "caches", 1, "layer"], 0, "expected one entry for each layer and kind"),
    (["target", "caches", 0, "layer"], 2, "caches is [2, 1], expected increasing layers"),
    (["target", "caches", 0, "width"], 4, "caches[0] has width 4, which this version"),
    (["target", "caches", 1, "kind"], None, "caches[1]: kind is None, expected one of"),
    (
        ["target", "caches", 1],
        {"kind": "convolution rows", "layer": 1, "width": 0, "num_ancestors": 2, "dtype": "fp32"},
        "caches[1]: width is 0, expected a number above 0",
    ),
    (
        ["target", "caches", 1],
        {"kind": "recurrent rows", "layer": 1, "dtype": "fp32"},
        "caches[1]: missing or unknown entries ['key_width', 'most_new_rows', 'num_heads'",
    ),
    (["target", "caches", 0, "dtype"], "float32", "caches[0]: dtype is 'float32', expected one"),
    (["target", "caches", 1, "kind"], "recurrent state", "caches[1] has kind 'recurrent state'"),
    (["target", "dtype"], "int4", "dtype is 'int4', expected one of fp32, fp16, bf16"),
    (["target", "logits"], "topk:259", "'topk:259', expected full or topk:K with K from 1 to 258"),
    (["target", "full_logits"], False, "full_logits is False, expected true with logits full"),
    (["draft", "bit_exact"], True, "bit_exact is True, expected one of ('by construction', 'ob"),
    (["draft", "bit_exact"], 0, "draft: bit_exact is 0, expected str"),
    (
        ["draft", "agreement"],
        {"num_tokens": 96, "best": 1.5, "overlap": 0.5, "best_four": 1.0},
        "draft: agreement: best is 1.5, expected a number from 0 to 1",
    ),
    (["draft"], {}, "draft: missing or unknown entries"),
    (["draft"], False, "draft is False, expected an object (family, vocab_size, bos_token_id, ."),
    (["target", "masks"], [], "masks is [], expected one of"),
    (["target", "masks"], ["attention_mask"] * 2, "expected one of"),
    (["target", "sliding_window"], 4, "sliding_window is 4, expected a number exactly when"),
    (["target", "masks"], ["attention_mask_sliding"], "sliding_window is None, expected"),
    (["draft", "quantization"], "int3", "quantization is 'int3', expected one of none, int8-dyn"),
    (["draft", "parity", "measure"], "kl", "measure is 'kl', expected one of max_abs_error, mean"),
    (["target", "parity", "limit"], float("nan"), "limit is nan, expected float"),
    (["target", "parity", "limit"], 10**400, "expected float"),
    (["files", "tokenizer.json"], {"size": 1}, "missing or unknown entries ['sha256']"),
    (["files"], {}, "lists no tokenizer.json; export again"),
    (["files", "tokenizer.json"], GONE, "lists no tokenizer.json"),
    (["files", "target/model.onnx"], GONE, "lists no target/model.onnx"),
    (["files", "draft/prune.onnx"], GONE, "lists no draft/prune.onnx"),
    (["draft", "caches"], GONE, "draft: missing or unknown entries ['caches']"),
    (["draft"], GONE, "missing or unknown entries ['draft']"),  # which null says
    (["files", "tokenizer.json", "mode"], 1, "tokenizer.json has mode 1, which"),
    (["target", "dtype"], "x" * 5000, "target: dtype is 'xxx"),
    (["target", "logits"], "gather", "target has a gather head, which this version no longer runs"),
]


@pytest.mark.parametrize(("place", "value", "said"), WRONG_VALUES)
def test_wrong_values_name_their_place(bundle_copy, place, value, said):
    assert said in refusal(edited(bundle_copy, put(place, value)))


LATER = [
    # what a later version may write, what is said of it
    (["surprise"], 1, "dsbd.json has surprise 1, which"),
    (["target", "surprise"], [1], "dsbd.json: target has surprise [1], which"),
    (["target", "logits"], "features", "dsbd.json: target has logits 'features', which"),
    (["draft", "logits"], "top", "dsbd.json: draft has logits 'top', which"),
    (["draft", "features"], {"width": 8, "own_width": 8, "rank": 1}, "features has rank 1, which"),
    (["draft", "d2t"], "draft/d2t.npy", "draft has d2t 'draft/d2t.npy', which"),
]


@pytest.mark.parametrize(("place", "value", "said"), LATER)
def test_a_later_versions_bundle_is_refused_by_the_name_of_the_field(
    bundle_copy, place, value, said
):
    edited(bundle_copy, put(["versions", "dsbd-ort"], "7.8.9"))
    message = refusal(edited(bundle_copy, put(place, value)))
    assert f"{said} this version of dsbd-ort does not know" in message
    assert "use the version that made the bundle ('7.8.9') or a later one" in message


def test_a_later_versions_field_that_is_null_or_absent_means_none(bundle_copy, tiny_bundle):
    def edit(data):
        data["surprise"] = data["target"]["surprise"] = None
        for name in ("bit_exact", "features"):
            del data["draft"][name]

    assert open_bundle(edited(bundle_copy, edit)).manifest == tiny_bundle.manifest


@pytest.mark.parametrize("claim", ["by construction", "observed", False, None])
def test_what_is_claimed_of_exactness(bundle_copy, claim):
    edited(bundle_copy, put(["target", "bit_exact"], claim))
    assert open_bundle(bundle_copy).entry("target").bit_exact == claim


@pytest.mark.parametrize(("as_version", "version"), [(as_version_2, 2), (as_version_3, 3)])
def test_older_versions_are_read_with_the_defaults(bundle_copy, tiny_bundle, as_version, version):
    bundle = open_bundle(edited(bundle_copy, as_version), verify=True)
    assert bundle.manifest == replace(tiny_bundle.manifest, schema_version=version)
    assert "caches" not in json.loads((bundle_copy / "dsbd.json").read_text())["target"]
    load_causal_lm(bundle, "target").close()


BROKEN = [  # (version, where in the manifest, what stands there, what is said of it)
    (as_version_3, ["kv"], None, "target: kv is None, expected an object (num_layers, num_heads,"),
    (as_version_3, ["kv", "num_layers"], 0, "kv: num_layers is 0, expected a number above 0"),
    (as_version_3, ["kv", "num_layers"], 10_001, "kv: num_layers is 10001, expected at most 10"),
    (as_version_3, ["kv", "head_dim"], 2**31, "kv: head_dim is 2147483648, expected at most"),
    (as_version_3, ["kv", "dtype"], "float32", "dtype is 'float32', expected one of fp32"),
    (as_version_2, [], 3, "export the bundle again"),
    (as_version_2, [], GONE, "export the bundle again"),
    (as_version_2, [], None, "schema_version 2 has no bundles without one"),
]


@pytest.mark.parametrize(("as_version", "place", "value", "said"), BROKEN)
def test_a_broken_manifest_of_an_older_version(bundle_copy, as_version, place, value, said):
    edited(bundle_copy, as_version)
    role = "target" if place or value is GONE else "draft"
    assert said in refusal(edited(bundle_copy, put([role, *place], value)))


def test_a_topk_engine_of_version_2_has_no_full_logits(tmp_path):
    old = TinyModel(logits="topk:8", full_logits=False)
    write_tiny_bundle(tmp_path / "bundle", target=old, draft=replace(old, seed=1))
    bundle = open_bundle(edited(tmp_path / "bundle", as_version_2))
    assert not bundle.entry("target").full_logits
    load_causal_lm(bundle, "target").close()


def test_a_bundle_without_a_draft_opens_and_a_draft_is_refused(bundle_copy):
    bundle = without_draft(bundle_copy, TinyModel())
    assert json.loads((bundle_copy / "dsbd.json").read_text())["draft"] is None
    assert (bundle.roles, bundle.manifest.draft) == (("target",), None)
    assert sorted(bundle.manifest.files)[0] == "target/model.onnx"
    load_causal_lm(bundle, "target").close()
    said = f"has no draft; add one with: dsbd-export --bundle {bundle_copy} --draft DRAFT"
    for ask in (bundle.entry, partial(load_causal_lm, bundle), lambda _: load_pair(bundle)):
        with pytest.raises(InputError, match=said):
            ask("draft")


def test_a_draft_of_null_with_files_of_a_draft(bundle_copy):
    """Its files are checked and never opened; the manifest decides."""
    edited(bundle_copy, lambda data: data.update(draft=None))
    bundle = open_bundle(bundle_copy, verify=True)
    assert bundle.roles == ("target",)
    with pytest.raises(InputError, match="has no draft"):
        load_causal_lm(bundle, "draft")


@pytest.mark.parametrize("name", ["target/model.onnx", "draft/prune.onnx", "tokenizer.json"])
def test_a_missing_file(bundle_copy, name):
    (bundle_copy / name).unlink()
    assert f"{name} is missing; copy the whole bundle" in refusal(bundle_copy)


@pytest.mark.parametrize("name", ["target/model.onnx.data", "tokenizer.json", "dsbd.json"])
def test_a_pointer_of_git_lfs(bundle_copy, name):
    file = bundle_copy / name
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    words = "is a pointer of git LFS, not the file itself; run 'git lfs pull' in"
    assert refusal(bundle_copy) == f"{file} {words} {file.parent}"


def test_a_truncated_file(bundle_copy):
    weights = bundle_copy / "target" / "model.onnx.data"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    message = refusal(bundle_copy)
    assert f"has {len(content) - 1} bytes, the manifest says {len(content)}" in message


def test_a_changed_byte_shows_under_verify_only(bundle_copy):
    weights = bundle_copy / "target" / "model.onnx.data"
    content = bytearray(weights.read_bytes())
    content[100] ^= 1
    weights.write_bytes(content)
    open_bundle(bundle_copy)
    message = refusal(bundle_copy, verify=True)
    assert "model.onnx.data has sha256" in message
    assert "copy it or export again" in message


OUTSIDE = "a file outside the bundle; refused"
BAD_NAMES = [(name, OUTSIDE) for name in ("../secret", "/etc/passwd", "..\\secret", "a\0b", "")]
BAD_NAMES += [("target/../../secret", OUTSIDE), ("x" * 5000, "xxxx"), ("\ud800", "")]


@pytest.mark.parametrize(("name", "said"), BAD_NAMES, ids=lambda text: repr(text[:20]))
def test_a_name_that_no_file_of_the_bundle_can_have(bundle_copy, name, said):
    (bundle_copy.parent / "secret").write_text("x")
    edited(bundle_copy, lambda data: data["files"].update({name: {"size": 1, "sha256": ""}}))
    assert said in refusal(bundle_copy)


@pytest.mark.parametrize("name", ["tokenizer.json", "target"])
def test_a_link_out_of_the_bundle(bundle_copy, name):
    outside = bundle_copy.parent / "outside"
    (bundle_copy / name).rename(outside)
    (bundle_copy / name).symlink_to(outside)
    assert "is a link out of the bundle" in refusal(bundle_copy)


def test_a_link_to_the_bundle_opens(bundle_copy):
    (bundle_copy.parent / "link").symlink_to(bundle_copy)
    open_bundle(bundle_copy.parent / "link", verify=True)


@pytest.mark.parametrize(
    "change", [{"vocab_size": 300}, {"bos_token_id": None}, {"eos_token_ids": [257, 3]}]
)
def test_a_pair_that_disagrees(bundle_copy, change):
    target = TinyModel().entry()
    write_manifest(bundle_copy, versions={}, target=target, draft=replace(target, **change))
    message = refusal(bundle_copy)
    assert f"differ in {next(iter(change))}" in message
    assert "export a pair that shares its tokenizer" in message
