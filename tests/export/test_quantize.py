"""Which weights are quantized, in families where that is not plain."""

from __future__ import annotations

from collections import Counter

import onnx
import pytest

from dsbd_export.config import ExportConfig
from dsbd_export.opening import open_checkpoint
from dsbd_export.pipeline import export_model
from scripts.family_checkpoints import FAMILY_CHECKPOINTS, VOCAB_SIZE, write_family_checkpoint

HIDDEN_SIZE = 48
OF_ATTENTION = 4  # exact, in pieces: scores and values of two layers
ROWS = [  # (checkpoint, quantization, what is said, operators of products)
    (
        "mixtral",
        "int8-dynamic",
        "9 products and 1 embeddings quantized, 2 routers left as they are",
        {"MatMulInteger": 9, "MatMul": OF_ATTENTION, "Gemm": 2},
    ),
    (
        "mixtral",
        "int4",
        "5 products and 1 embeddings quantized, 2 routers and 4 expert products left as they are",
        {"MatMulNBits": 5, "MatMul": 4, "Gemm": 2},
    ),
    # Biased products, and a tied head whose embedding sees the tokens through a Reshape.
    (
        "gpt2",
        "int8-dynamic",
        "9 products and 1 embeddings quantized",
        {"MatMulInteger": 9, "MatMul": OF_ATTENTION},
    ),
    (
        "gpt2",
        "int8-blocks",
        "9 products and 1 embeddings quantized",
        {"MatMulNBits": 9, "MatMul": OF_ATTENTION},
    ),
]


@pytest.mark.parametrize(("name", "quantize", "said", "products"), ROWS)
def test_what_is_quantized_passes_the_gate(name, quantize, said, products, captures, tmp_path):
    options = ExportConfig(
        target="",
        draft="",
        output=tmp_path,
        quantize=quantize,
        max_context=FAMILY_CHECKPOINTS[name].max_context,
    )
    folder = write_family_checkpoint(name, tmp_path / "checkpoint")
    report: list[str] = []
    checkpoint = open_checkpoint("target", folder, options)
    export_model(checkpoint, tmp_path, options, report.append, captures)
    assert any(line.split(";")[0] == f"target: {said}" for line in report)
    graph = onnx.load(tmp_path / "target" / "model.onnx", load_external_data=False).graph
    is_rotation = [
        len(node.input) > 1 and node.input[1].startswith("equalize.rotation_")
        for node in graph.node
    ]
    found = Counter(
        node.op_type for node, skip in zip(graph.node, is_rotation, strict=True) if not skip
    )
    kinds = ("MatMulInteger", "MatMulNBits", "MatMul", "Gemm")
    assert {kind: found[kind] for kind in kinds if found[kind]} == products
    floats = [t for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    assert not [t.name for t in floats if list(t.dims) == [VOCAB_SIZE, HIDDEN_SIZE]]
