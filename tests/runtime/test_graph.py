"""The kinds of output that a manifest may name."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dsbd_runtime.errors import BundleError
from dsbd_runtime.parts.attention.cache_entries import AttentionRows
from dsbd_runtime.parts.graph_check import check_graph
from dsbd_runtime.parts.head.head import head_outputs, parse_num_top_logits
from dsbd_runtime.parts.source.encoder_entry import EncoderEntry
from tests.runtime.tiny_graph import TinyModel

KINDS = [("full", 0), ("topk:1", 1), ("topk:64", 64), ("topk:128256", 128256)]
NO_KINDS = ["", "Full", "topk", "topk:", "topk:0", "topk:-1", "topk:08", "topk:4.0", "topk: 4", "4"]


@pytest.mark.parametrize(("kind", "num_candidates"), KINDS)
def test_kinds(kind, num_candidates):
    assert parse_num_top_logits(kind) == num_candidates


@pytest.mark.parametrize("kind", [*NO_KINDS, "topk:²"])
def test_what_is_no_kind(kind):
    with pytest.raises(ValueError, match="neither 'full' nor topk:K"):
        parse_num_top_logits(kind)


def test_outputs_and_their_shapes():
    dense = head_outputs("full", 300)
    assert {o.name: (o.shape(3), o.dtype) for o in dense} == {"logits": ((3, 300), np.float32)}
    largest = head_outputs("topk:8", 300)
    assert {output.name: (output.shape(3), output.dtype) for output in largest} == {
        "top_logits": ((3, 8), np.float32),
        "top_ids": ((3, 8), np.int64),
        "logsumexp": ((3,), np.float32),
    }


@pytest.mark.parametrize(
    ("model", "kept", "outputs"),
    [
        (TinyModel(), None, ["logits"]),
        (TinyModel(logits="topk:8"), "logits", ["top_logits", "top_ids", "logsumexp", "logits"]),
        (
            TinyModel(logits="topk:8", full_logits=False),
            None,
            ["top_logits", "top_ids", "logsumexp"],
        ),
    ],
)
def test_the_full_logits_of_a_topk_engine_are_kept(model, kept, outputs):
    entry = model.entry()
    assert entry.head.keeps_full == (kept is not None)
    assert [name for name in entry.contract.outputs if "present" not in name] == outputs
    assert [output.name for output in entry.head.outputs if output.name != kept] == outputs[:3]


@dataclass
class FoundTensor:
    name: str
    type: str
    shape: tuple[int | str | None, ...]


def found_tensors(specs):
    dynamic = {
        name: tuple(d if isinstance(d, int) else None for d in s.shape) for name, s in specs.items()
    }
    return [FoundTensor(name, spec.type, dynamic[name]) for name, spec in specs.items()]


def session(inputs, outputs):
    return SimpleNamespace(get_inputs=lambda: inputs, get_outputs=lambda: outputs)


def test_a_decoder_that_reads_one_source_a_call_is_exported_again():
    """As encoder-decoders were exported before calls had several sources."""
    cross = AttentionRows(layer=0, num_heads=2, key_width=4, value_width=4, dtype="fp32")
    encoder = EncoderEntry(vocab_size=9, context_length=9, start_token_id=0, cross=[cross])
    contract = replace(TinyModel().entry(), encoder=encoder).contract
    outputs = found_tensors(contract.outputs)
    inputs = found_tensors(contract.inputs)
    check_graph(Path("model.onnx"), contract, session(inputs, outputs))
    names = ("source_rows", "source_places", "source_lengths")
    for name in names:
        without = [tensor for tensor in inputs if tensor.name != name]
        words = f"model.onnx lacks the input {name}; export the bundle again"
        with pytest.raises(BundleError, match=words):
            check_graph(Path("model.onnx"), contract, session(without, outputs))
    of_one = [
        replace(tensor, shape=(1, *tensor.shape[1:])) if "cross" in tensor.name else tensor
        for tensor in inputs
    ]
    with pytest.raises(BundleError, match=r"cross.0.key of shape \[1, 2, None, 4\]"):
        check_graph(Path("model.onnx"), contract, session(of_one, outputs))
