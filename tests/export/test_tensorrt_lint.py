"""Right graphs have no finding, each broken one has its own."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from dsbd_export.capture.graph_checks import lint_for_tensorrt

RIGHT = """
<ir_version: 10, opset_import: ["": 24, "other": 1]>
forest (float16[1,2,S,8] q, float16[1,2,S,8] new, bool[1,1,S,C] mask, int64[1] at,
        float16[1,2,C,8] past) => (float[1,2,S,8] out, float16[1,2,C,8] present)
<float16[1,2,S,8] y>
{
    present = TensorScatter <axis = 2, mode = "linear"> (past, new, at)
    y = Attention <is_causal = 0> (q, present, present, mask)
    out = Cast <to = 1> (y)
}
"""
BROKEN = [  # (what is replaced by what, words of the finding)
    ({'"": 24': '"": 26'}, "opset 26, expected at most 25"),
    ({"out = Cast": "other_y = other.Copy(y)\n out = Cast"}, "operator other::Copy"),
    ({"axis = 2": "axis = 1"}, "axis 1, expected 2"),
    ({'mode = "linear"': 'mode = "circular"'}, "mode circular, expected linear"),
    ({"float16[1,2,C,8] past)": "float16[2,C,8] past)"}, "expected 4 axes"),
    ({"is_causal = 0": "is_causal = 1"}, "is_causal 1, expected 0"),
    ({"is_causal = 0": "softcap = 30.0"}, "softcap 30, expected none"),
    ({"present, mask)": "present, mask, past, past)"}, "2 findings"),
    ({"present, mask)": "present, mask, , , at)"}, "input nonpad_kv_seqlen, expected none"),
    ({"y = Attention": "y, k, v = Attention"}, "3 outputs, expected one"),
    ({"bool[1,1,S,C] mask": "float[1,1,S,C] mask"}, "Attention to y mixes FLOAT and FLOAT16"),
    (
        {
            "past) =>": "past, float16[1,2,C,8] old) =>",
            "(past, new": "(copy, new",
            "{\n    present": "{\n    copy = Identity(old)\n    present",
            "<float16[1,2,S,8] y>": "<float16[1,2,S,8] y, float16[1,2,C,8] copy>",
        },
        "updates copy, expected a graph input",
    ),
    (
        {
            "present = ": "updated = ",
            "q, present, present": "q, updated, updated",
            "out = ": "present = Identity(updated)\n out = ",
        },
        "TensorScatter to updated makes no graph output",
    ),
]


def model_of(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(text))


def test_a_right_graph():
    assert lint_for_tensorrt(model_of(RIGHT)) == []


@pytest.mark.parametrize(("changes", "words"), BROKEN)
def test_a_broken_graph(changes, words):
    text = RIGHT
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    findings = lint_for_tensorrt(model_of(text))
    assert words in f"{len(findings)} findings: {findings}"
    assert len(findings) == 1 or words == "2 findings"


def test_exported_graphs_are_right(exported, exported_others):
    for bundle in (exported, exported_others):
        for role in ("target", "draft"):
            assert lint_for_tensorrt(ir.from_proto(bundle.model(role))) == []
