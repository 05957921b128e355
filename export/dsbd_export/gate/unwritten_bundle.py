"""Bundles of the parity gate: a folder without a manifest, and the fp32 twin of a bf16 engine.

The CPU provider has no MatMul, Add, ... in bf16. In the twin all weights are widened and all
arithmetic is fp32. So parity judges the graph and the rounded weights, not arithmetic in bf16.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import TensorProto, helper, numpy_helper

from dsbd_export.changed_bundle import link
from dsbd_runtime.bundle_files.bundle import (
    SCHEMA_VERSION,
    Bundle,
    Manifest,
    ModelEntry,
    ParityReport,
)

NOT_MEASURED = ParityReport(
    measure="mean_kl", limit=0.0, max_abs_error=0.0, mean_kl=0.0, top1_agreement=0.0, cases=[]
)


def unwritten_bundle(
    path: Path, role: str, entry: ModelEntry, target: ModelEntry | None = None
) -> Bundle:
    """Return a bundle in memory; ``target``: entry of a draft's target, to share its encoder."""
    is_draft = role == "draft"
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        versions={},
        target=target if is_draft and target is not None else entry,
        draft=entry if is_draft else None,
        files={},
    )
    return Bundle(path, manifest)


_LOW, _HIGH = TensorProto.BFLOAT16, TensorProto.FLOAT


@contextlib.contextmanager
def runnable_on_cpu(bundle: Bundle, role: str) -> Iterator[Bundle]:
    """Yield a bundle whose engine of ``role`` the CPU can run; for bf16 that is the twin's."""
    entry = bundle.entry(role)
    if entry.dtype != "bf16":
        yield bundle
        return
    with tempfile.TemporaryDirectory(dir=bundle.path) as name:
        folder = Path(name) / role
        folder.mkdir()
        for file in (bundle.path / role).iterdir():
            if file.suffix == ".onnx":
                (folder / file.name).write_bytes(fp32_twin(file))
            else:
                link(file, folder / file.name)
        caches = [replace(cache, dtype="fp32") for cache in entry.caches]
        yield unwritten_bundle(folder.parent, role, replace(entry, dtype="fp32", caches=caches))


def fp32_twin(model_file: Path) -> bytes:
    """Return the twin; weights in ``model_file``'s external data are widened when they are used."""
    model = onnx.load(model_file, load_external_data=False)
    graph = model.graph
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == _LOW:
            value.type.tensor_type.elem_type = _HIGH
    del graph.value_info[:]
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        _widen_attribute(attribute)
    stored = {weight.name for weight in graph.initializer if weight.data_type == _LOW}
    nodes = [part for node in graph.node for part in _with_widened_weights(node, stored)]
    del graph.node[:]
    graph.node.extend(nodes)
    twin: bytes = model.SerializeToString()
    return twin


def _with_widened_weights(node: onnx.NodeProto, stored: set[str]) -> list[onnx.NodeProto]:
    """Return a node with the Casts that it needs, one for each stored weight that it reads."""
    if node.op_type == "Gather" and node.input[0] in stored:  # few rows of an embedding
        rows, (result,) = f"{node.output[0]}.stored", node.output
        node.output[0] = rows
        return [node, helper.make_node("Cast", [rows], [result], to=_HIGH)]
    casts = []
    for index, name in enumerate(node.input):
        if name in stored:
            node.input[index] = f"{name}.for.{node.output[0]}.{index}"
            casts.append(helper.make_node("Cast", [name], [node.input[index]], to=_HIGH))
    return [*casts, node]


def _widen_attribute(attribute: onnx.AttributeProto) -> None:
    """Change the target type of a Cast, or the type of a constant's value, to fp32."""
    if attribute.name == "to" and attribute.i == _LOW:
        attribute.i = _HIGH
    if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == _LOW:
        widened = numpy_helper.to_array(attribute.t).astype("float32")
        attribute.t.CopyFrom(numpy_helper.from_array(widened, attribute.t.name))
