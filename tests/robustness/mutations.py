"""Damage done to a bundle: each kind changes one copy, chosen and placed by a generator."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from dsbd_runtime.bundle_files.bundle import sha256_of

FILES = (
    "dsbd.json",
    "tokenizer.json",
    *(f"{r}/{f}" for r in ("target", "draft") for f in ("model.onnx", "model.onnx.data")),
)
ODD_VALUES: list[Any] = [
    None, True, -1, 0, 1, 3, 2**31, 2**63, -(2**63), 10**30, 1.5, 1e308, float("nan"), "", "x",
    "fp16", "x" * 10_000, "\ud800", "\0", [], [0], [[]], {}, {"a": 1}, "topk:5", "../..",
    "/etc/passwd",
]  # fmt: skip
OUTSIDE = ("../secret", "../../secret", "/etc/passwd", "target/../../secret", "a\\..\\b", "a\0b")
LOCATIONS = ("../../secret", "../draft/model.onnx.data", "/proc/self/environ", "link", "")
Rng = np.random.Generator


def one_of(rng: Rng, choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def truncated(bundle: Path, rng: Rng) -> None:
    file = bundle / one_of(rng, FILES)
    content = file.read_bytes()
    file.write_bytes(content[: int(rng.integers(len(content)))])
    maybe_listed_anew(bundle, rng)


def flipped(bundle: Path, rng: Rng) -> None:
    file = bundle / one_of(rng, FILES)
    content = bytearray(file.read_bytes())
    for _ in range(int(rng.integers(1, 9))):
        content[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
    file.write_bytes(content)


def spliced(bundle: Path, rng: Rng) -> None:
    file = bundle / one_of(rng, FILES)
    content = file.read_bytes()
    start, stop = sorted(int(i) for i in rng.integers(len(content), size=2))
    stop = min(stop, start + 64)
    file.write_bytes(content[:start] + rng.bytes(int(rng.integers(64))) + content[stop:])
    maybe_listed_anew(bundle, rng)


def manifest_changed(bundle: Path, rng: Rng) -> None:
    change_json(bundle / "dsbd.json", rng)


def tokenizer_changed(bundle: Path, rng: Rng) -> None:
    change_json(bundle / "tokenizer.json", rng)
    listed_anew(bundle)


def roles_swapped(bundle: Path, rng: Rng) -> None:
    name = one_of(rng, ["", "/model.onnx", "/model.onnx.data", "/prune.onnx"])
    ours, theirs = bundle / f"target{name}", bundle / f"draft{name}"
    ours.rename(bundle / "swap")
    theirs.rename(ours)
    (bundle / "swap").rename(theirs)
    maybe_listed_anew(bundle, rng)


def name_outside(bundle: Path, rng: Rng) -> None:
    manifest = json.loads((bundle / "dsbd.json").read_text())
    entry = {"size": 6, "sha256": "0" * 64}
    if rng.random() < 0.5:
        entry = manifest["files"].pop(one_of(rng, sorted(manifest["files"])))
    manifest["files"][one_of(rng, OUTSIDE)] = entry
    (bundle / "dsbd.json").write_text(json.dumps(manifest))


def linked_outside(bundle: Path, rng: Rng) -> None:
    name = one_of(rng, [*FILES, "target", "draft", "tokenizer_config.json", "target/more"])
    path, outside = bundle / name, bundle.parent / "outside"
    if path.exists():
        path.rename(outside)
    path.symlink_to(outside)


def data_outside(bundle: Path, rng: Rng) -> None:
    """Let a tensor lie outside of the model's folder."""
    (bundle / "target" / "link").unlink(missing_ok=True)
    location = one_of(rng, LOCATIONS)
    if location == "link":
        (bundle / "target" / "link").symlink_to(bundle.parent / "secret")

    def edit(model: onnx.ModelProto) -> None:
        tensors = [tensor for tensor in model.graph.initializer if tensor.external_data]
        data_located(one_of(rng, tensors), location)

    edit_onnx(bundle, edit)


def data_located(tensor: onnx.TensorProto, location: str) -> None:
    """Name another file for the data of a tensor."""
    for entry in tensor.external_data:
        if entry.key == "location":
            entry.value = location


def data_misplaced(bundle: Path, rng: Rng) -> None:
    """Give a tensor another place or length in its file."""

    def edit(model: onnx.ModelProto) -> None:
        tensor = one_of(rng, [t for t in model.graph.initializer if t.external_data])
        entry = one_of(rng, tensor.external_data)
        entry.value = str(one_of(rng, [-1, 0, 1, 4096, 2**31, 2**62, 2**64, "x", "model.onnx"]))

    edit_onnx(bundle, edit)


def tensor_changed(bundle: Path, rng: Rng) -> None:
    """Give a tensor another type or size."""

    def edit(model: onnx.ModelProto) -> None:
        tensor = one_of(rng, model.graph.initializer)
        if rng.random() < 0.5:
            tensor.data_type = int(rng.integers(26))
        elif tensor.dims:
            place = int(rng.integers(len(tensor.dims)))
            tensor.dims[place] = one_of(rng, [0, -1, 1, 7, 2**31, 2**40, 2**62])

    edit_onnx(bundle, edit)


def graph_changed(bundle: Path, rng: Rng) -> None:
    """Change an operator, its inputs, or what the graph takes and gives."""

    def edit(model: onnx.ModelProto) -> None:
        node = one_of(rng, model.graph.node)
        info = one_of(rng, [*model.graph.input, *model.graph.output])
        kind = int(rng.integers(8))
        if kind == 0:
            node.domain = one_of(rng, ["evil.ops", "com.microsoft", "ai.onnx.ml"])
        elif kind == 1:
            node.op_type = one_of(rng, ["Foo", "Loop", "Identity", "EPContext", "Gather", "Add"])
        elif kind == 2 and node.input:
            other = one_of(rng, model.graph.node)
            place = int(rng.integers(len(node.input)))
            node.input[place] = one_of(rng, ["", "nothing", *other.output, *node.output])
        elif kind == 3:
            model.graph.node.remove(node)
        elif kind == 4:
            model.opset_import[0].version = int(one_of(rng, [0, 1, 13, 23, 99, 2**31]))
        elif kind == 5:
            info.type.tensor_type.elem_type = int(rng.integers(1, 22))
        elif kind == 6 and info.type.tensor_type.shape.dim:
            one_of(rng, info.type.tensor_type.shape.dim).dim_value = int(
                one_of(rng, [0, 2, 7, 2**31, 2**62])
            )
        else:
            info.name = one_of(rng, ["", "other", "logits", "input_ids"])

    edit_onnx(bundle, edit)


def file_replaced(bundle: Path, rng: Rng) -> None:
    """Put a folder, a pipe, nothing or a huge hollow file where a file was."""
    path = bundle / one_of(rng, [*FILES, "tokenizer_config.json", "chat_template.jinja"])
    path.unlink(missing_ok=True)
    kind = one_of(rng, ["folder", "pipe", "nothing", "hollow"])
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "hollow":
        with path.open("wb") as file:
            file.truncate(2**40)


MUTATIONS: list[Callable[[Path, Rng], None]] = [
    truncated,
    flipped,
    spliced,
    manifest_changed,
    tokenizer_changed,
    roles_swapped,
    name_outside,
    linked_outside,
    data_outside,
    data_misplaced,
    tensor_changed,
    graph_changed,
    file_replaced,
]
ALWAYS_REFUSED = ("name_outside", "linked_outside", "data_outside")


def mutated_copy(bundle: Path, folder: Path, seed: int) -> str:
    """Copy the bundle to ``folder`` and damage it; return the name of the mutation."""
    shutil.rmtree(folder.parent, ignore_errors=True)
    shutil.copytree(bundle, folder)
    (folder.parent / "secret").write_bytes(b"secret")
    mutation = MUTATIONS[seed % len(MUTATIONS)]
    mutation(folder, np.random.default_rng(seed))
    return mutation.__name__


def edit_onnx(bundle: Path, edit: Callable[[onnx.ModelProto], None]) -> None:
    path = bundle / "target" / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    edit(model)
    path.write_bytes(model.SerializeToString())
    listed_anew(bundle)


def change_json(file: Path, rng: Rng) -> None:
    """Replace, remove or add one value somewhere in a JSON file."""
    data = json.loads(file.read_text())
    place = data
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = one_of(rng, keys)
        if isinstance(place[key], dict | list) and rng.random() < 0.8:
            place = place[key]
            continue
        if rng.random() < 0.2:
            del place[key]
        else:
            place[key] = one_of(rng, ODD_VALUES)
        break
    file.write_text(json.dumps(data))


def maybe_listed_anew(bundle: Path, rng: Rng) -> None:
    """Do what an attacker does and an accident does not: make size and hash fit again."""
    if rng.random() < 0.8:
        listed_anew(bundle)


def listed_anew(bundle: Path) -> None:
    try:
        manifest = json.loads((bundle / "dsbd.json").read_text())
        for name in manifest["files"]:
            file = bundle / name
            manifest["files"][name] = {"size": file.stat().st_size, "sha256": sha256_of(file)}
    except (ValueError, KeyError, TypeError):
        return  # the manifest itself is what is damaged
    (bundle / "dsbd.json").write_text(json.dumps(manifest))
