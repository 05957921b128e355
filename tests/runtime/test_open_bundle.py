"""Opening a bundle: a good one opens, each kind of damage is one line that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsbd_runtime.bundle import Bundle, open_bundle, write_manifest
from dsbd_runtime.errors import BundleError, CapacityError, DsbdError, InputError, ProviderError
from tests.runtime.tiny_graph import TinyModel


def edited(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Change the manifest's JSON in place; return the folder."""
    file = folder / "dsbd.json"
    data = json.loads(file.read_text())
    edit(data)
    file.write_text(json.dumps(data))
    return folder


def refusal(folder: Path, *, verify: bool = False) -> str:
    with pytest.raises(BundleError) as caught:
        open_bundle(folder, verify=verify)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def test_a_good_bundle_opens(tiny_bundle: Bundle) -> None:
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


def test_an_unknown_role_is_refused(tiny_bundle: Bundle) -> None:
    for ask in (tiny_bundle.entry, tiny_bundle.model_path, tiny_bundle.prune_path):
        with pytest.raises(InputError, match="no model 'drafts'; ask for one of target, draft"):
            ask("drafts")


def test_no_such_folder(tmp_path: Path) -> None:
    assert "no such folder; make one with dsbd-export" in refusal(tmp_path / "nowhere")


def test_a_file_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    assert "no such folder" in refusal(tmp_path / "file")


def test_no_manifest(tmp_path: Path) -> None:
    assert f"{tmp_path} is no bundle: it has no dsbd.json" in refusal(tmp_path)


NOT_JSON = [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": ' * 100_000, b"9" * 10_000]


@pytest.mark.parametrize("content", NOT_JSON, ids=lambda content: repr(content[:8]))
def test_a_manifest_that_is_no_json(bundle_copy: Path, content: bytes) -> None:
    (bundle_copy / "dsbd.json").write_bytes(content)
    assert "dsbd.json cannot be read as JSON" in refusal(bundle_copy)


@pytest.mark.parametrize("version", [3, 1, None, "2", 2.0, True, [1], {"a": "b" * 1000}])
def test_another_schema_version(bundle_copy: Path, version: Any) -> None:
    edited(bundle_copy, lambda data: data.update(schema_version=version))
    message = refusal(bundle_copy)
    assert f"has schema_version {version!r}"[:60] in message
    assert "this version reads 2; export the bundle again" in message


@pytest.mark.parametrize("content", ["[]", "3", "null", '"text"', "{}"])
def test_a_manifest_that_is_no_object(bundle_copy: Path, content: str) -> None:
    (bundle_copy / "dsbd.json").write_text(content)
    assert "has schema_version None" in refusal(bundle_copy)


WRONG_VALUES: list[tuple[list[str | int], Any, str]] = [
    # where in the manifest, what stands there, what is said of it
    (["target"], [], "target is [], expected ModelEntry"),
    (["target", "vocab_size"], "258", "target: vocab_size is '258', expected int"),
    (["target", "vocab_size"], 258.0, "target: vocab_size is 258.0, expected int"),
    (["target", "vocab_size"], True, "target: vocab_size is True, expected int"),
    (["draft", "vocab_size"], 0, "draft: vocab_size is 0, expected a number above 0"),
    (["target", "bos_token_id"], "1", "target: bos_token_id is '1', expected int"),
    (["target", "bos_token_id"], 258, "a special token id is 258, expected 0 to 257"),
    (["target", "eos_token_ids"], 257, "target: eos_token_ids is 257, expected list"),
    (["target", "eos_token_ids"], [257, None], "eos_token_ids[1] is None, expected int"),
    (["target", "eos_token_ids"], [-1], "a special token id is -1, expected 0 to 257"),
    (["target", "eos_token_ids"], [258], "a special token id is 258, expected 0 to 257"),
    (["target", "context_length"], -5, "context_length is -5, expected a number above 0"),
    (["target", "kv"], None, "target: kv is None, expected KVGeometry"),
    (["target", "kv", "num_layers"], 0, "kv: num_layers is 0, expected a number above 0"),
    (["target", "kv", "dtype"], "float32", "kv: dtype is 'float32', expected one of fp32"),
    (["target", "dtype"], "int4", "dtype is 'int4', expected one of fp32, fp16, bf16"),
    (["target", "logits"], "topk:0", "logits is 'topk:0', expected full or topk:K with K from 1"),
    (["target", "logits"], "topk:259", "'topk:259', expected full or topk:K with K from 1 to 258"),
    (["target", "logits"], "top", "logits is 'top', expected full or topk:K"),
    (["target", "masks"], [], "masks is [], expected one of"),
    (["target", "masks"], ["attention_mask"] * 2, "expected one of"),
    (["target", "masks"], ["other"], "masks is ['other'], expected one of"),
    (["target", "sliding_window"], 4, "sliding_window is 4, expected a number exactly when"),
    (["target", "masks"], ["attention_mask_sliding"], "sliding_window is None, expected"),
    (
        ["draft", "quantization"],
        "int3",
        "quantization is 'int3', expected one of none, int8-dynamic",
    ),
    (
        ["draft", "parity", "measure"],
        "kl",
        "measure is 'kl', expected one of max_abs_error, mean_kl",
    ),
    (["target", "parity", "limit"], "1", "limit is '1', expected float"),
    (["target", "parity", "limit"], float("nan"), "limit is nan, expected float"),
    (["target", "parity", "limit"], 10**400, "expected float"),
    (["target", "parity", "cases"], [{}], "cases[0]: missing or unknown entries ['max_abs_err"),
    (["versions"], [1], "versions is [1], expected dict"),
    (["versions"], {"a": 1}, "versions: a is 1, expected str"),
    (["files", "tokenizer.json"], {"size": 1}, "missing or unknown entries ['sha256']"),
    (["files", "tokenizer.json", "size"], "1", "tokenizer.json: size is '1', expected int"),
    (["files"], {}, "lists no tokenizer.json; export again"),
    (["surprise"], 1, "missing or unknown entries ['surprise']"),
    (["target", "dtype"], "x" * 5000, "target: dtype is 'xxx"),
]


@pytest.mark.parametrize(("place", "value", "said"), WRONG_VALUES)
def test_wrong_values_name_their_place(
    bundle_copy: Path, place: list[str | int], value: Any, said: str
) -> None:
    def edit(data: Any) -> None:
        for key in place[:-1]:
            data = data[key]
        data[place[-1]] = value

    assert said in refusal(edited(bundle_copy, edit))


def test_a_missing_entry_is_named(bundle_copy: Path) -> None:
    edited(bundle_copy, lambda data: data["draft"].pop("kv"))
    assert "draft: missing or unknown entries ['kv']" in refusal(bundle_copy)


@pytest.mark.parametrize("name", ["target/model.onnx", "draft/prune.onnx", "tokenizer.json"])
def test_a_missing_file(bundle_copy: Path, name: str) -> None:
    (bundle_copy / name).unlink()
    assert f"{name} is missing; copy the whole bundle" in refusal(bundle_copy)


@pytest.mark.parametrize("name", ["target/model.onnx", "draft/prune.onnx", "tokenizer.json"])
def test_a_file_that_the_manifest_must_list(bundle_copy: Path, name: str) -> None:
    edited(bundle_copy, lambda data: data["files"].pop(name))
    assert f"lists no {name}" in refusal(bundle_copy)


def test_a_truncated_file(bundle_copy: Path) -> None:
    weights = bundle_copy / "target" / "model.onnx.data"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    message = refusal(bundle_copy)
    assert f"has {len(content) - 1} bytes, the manifest says {len(content)}" in message


def test_a_changed_byte_shows_under_verify_only(bundle_copy: Path) -> None:
    weights = bundle_copy / "target" / "model.onnx.data"
    content = bytearray(weights.read_bytes())
    content[100] ^= 1
    weights.write_bytes(content)
    open_bundle(bundle_copy)
    message = refusal(bundle_copy, verify=True)
    assert "model.onnx.data has sha256" in message
    assert "copy it or export again" in message


OUTSIDE = ["../secret", "/etc/passwd", "target/../../secret", "..\\secret", "a\0b", ""]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_path_out_of_the_bundle(bundle_copy: Path, name: str) -> None:
    (bundle_copy.parent / "secret").write_text("x")
    edited(bundle_copy, lambda data: data["files"].update({name: {"size": 1, "sha256": ""}}))
    assert "a file outside the bundle; refused" in refusal(bundle_copy)


@pytest.mark.parametrize("name", ["x" * 5000, "\ud800"])
def test_a_name_that_no_file_can_have(bundle_copy: Path, name: str) -> None:
    edited(bundle_copy, lambda data: data["files"].update({name: {"size": 1, "sha256": ""}}))
    with pytest.raises(BundleError):
        open_bundle(bundle_copy)


@pytest.mark.parametrize("name", ["tokenizer.json", "target"])
def test_a_link_out_of_the_bundle(bundle_copy: Path, name: str) -> None:
    outside = bundle_copy.parent / "outside"
    (bundle_copy / name).rename(outside)
    (bundle_copy / name).symlink_to(outside)
    assert "is a link out of the bundle" in refusal(bundle_copy)


def test_a_link_to_the_bundle_opens(bundle_copy: Path) -> None:
    link = bundle_copy.parent / "link"
    link.symlink_to(bundle_copy)
    open_bundle(link, verify=True)


@pytest.mark.parametrize(
    "change", [{"vocab_size": 300}, {"bos_token_id": None}, {"eos_token_ids": [257, 3]}]
)
def test_a_pair_that_disagrees(bundle_copy: Path, change: dict[str, Any]) -> None:
    target = TinyModel().entry()
    write_manifest(bundle_copy, versions={}, target=target, draft=replace(target, **change))
    message = refusal(bundle_copy)
    assert f"differ in {next(iter(change))}" in message
    assert "export a pair that shares its tokenizer" in message


def test_every_error_is_a_dsbd_error() -> None:
    assert all(issubclass(e, DsbdError) for e in (BundleError, ProviderError, CapacityError))
    assert issubclass(InputError, DsbdError) and issubclass(InputError, ValueError)
