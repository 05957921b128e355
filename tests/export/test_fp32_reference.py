"""References of a model in low precision, and the twin of a bf16 graph: arithmetic in fp32."""

from functools import partial

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
)

from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ExportConfig
from dsbd_export.gate.unwritten_bundle import fp32_twin
from dsbd_export.opening import open_pair
from dsbd_export.parity_cases import ComputeIn, forest_cases, reference_logits
from tests.export.conftest import SIZES, parsed_graph, write_checkpoint
from tests.ort_sessions import cpu_session

FAMILIES: list[PreTrainedConfig] = [
    LlamaConfig(**SIZES, num_hidden_layers=2, tie_word_embeddings=True),
    GPT2Config(**SIZES, num_hidden_layers=2),
    Gemma3TextConfig(**SIZES, num_hidden_layers=2, head_dim=12),
    MixtralConfig(**SIZES, num_hidden_layers=2, num_local_experts=4),
]


def family_of(config: PreTrainedConfig) -> str:
    return config.model_type


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", FAMILIES, ids=family_of)
def test_a_model_in_low_precision_computes_in_fp32(config, dtype):
    torch.manual_seed(0)
    low = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in low.parameters():
        parameter.data = parameter.data.to(dtype)
    ids = torch.arange(40)[None]
    with torch.no_grad(), ComputeIn(torch.float32):
        found = low(input_ids=ids, use_cache=False).logits
        assert low.dtype == torch.float32  # what the code of a model is told
    rounded = low.float()
    with torch.no_grad():
        wanted = rounded(input_ids=ids, use_cache=False).logits
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", FAMILIES, ids=family_of)
def test_a_model_in_fp32_computes_in_float64(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    ids = torch.arange(40)[None]
    with torch.no_grad(), ComputeIn(torch.float64):
        found = model(input_ids=ids, use_cache=False).logits
    assert found.dtype == torch.float64 and torch.get_default_dtype() == torch.float32
    with torch.no_grad():
        rounded = model(input_ids=ids, use_cache=False).logits
        wide = model.double()(input_ids=ids, use_cache=False).logits  # its norms still in fp32
    torch.testing.assert_close(found, rounded.double(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, wide, atol=1e-5, rtol=1e-5)
    assert (found - wide).abs().max() < (found - rounded).abs().max()


@pytest.mark.parametrize("config", FAMILIES[:3], ids=family_of)
def test_references_of_a_loaded_checkpoint(config, tmp_path):
    """The checkpoint holds fp16, so loading it in fp32 gives the same weights."""
    folder = write_checkpoint(tmp_path, config)
    checkpoint, _ = open_pair(ExportConfig(target=str(folder), draft=str(folder), output=tmp_path))
    low, full = load_model(checkpoint, "fp16"), load_model(checkpoint, "fp32")
    assert {parameter.dtype for parameter in low.parameters()} == {torch.float16}
    for case in forest_cases(checkpoint)[:6]:
        found, wanted = reference_logits(low, case), reference_logits(full, case)
        np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())
    assert {parameter.dtype for parameter in low.parameters()} == {torch.float16}


def test_a_linear_layer_in_pieces():
    torch.manual_seed(0)
    inputs, weight, bias = torch.randn(2, 3, 10), torch.randn(7, 10).half(), torch.randn(7).half()
    with ComputeIn(torch.float32, chunk_elements=20):  # two rows of ten
        found = F.linear(inputs, weight, bias)
        without_bias = F.linear(inputs.half(), weight)
    torch.testing.assert_close(found, F.linear(inputs, weight.float(), bias.float()))
    torch.testing.assert_close(without_bias, F.linear(inputs.half().float(), weight.float()))


def test_results_are_fp32_and_weights_stay():
    weight = torch.ones(4, 4, dtype=torch.bfloat16)
    with ComputeIn(torch.float32):
        assert (weight @ weight).dtype == torch.float32
        assert torch.zeros(2, dtype=torch.float16).dtype == torch.float32
        assert weight.to(torch.float16).dtype == torch.float32
        assert weight[0].dtype == weight.dtype == torch.float32
    assert weight.dtype == torch.bfloat16


ROWS = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


def bf16_graph(file):
    """``table[ids] @ table.T + 1``, the table tied and in bf16."""
    model = parsed_graph(
        """(int64[S] ids) => (float[S,3] logits) {
            hidden = Gather(table, ids)
            product = Gemm <transB = 1> (hidden, table)
            sum = Add(product, one)
            logits = Cast <to = 1> (sum)
        }"""
    )
    make = partial(onnx.helper.make_tensor, data_type=TensorProto.BFLOAT16)
    for name, dims, vals in (("table", [3, 2], np.ravel(ROWS)), ("one", [1], [1.0])):
        model.graph.initializer.append(make(name, dims=dims, vals=vals))
    onnx.save(model, file)


def test_the_twin_computes_in_fp32(tmp_path):
    bf16_graph(tmp_path / "model.onnx")
    session = cpu_session(fp32_twin(tmp_path / "model.onnx"))
    found = session.run(None, {"ids": np.array([2, 1])})[0]
    table = torch.tensor(ROWS)
    np.testing.assert_array_equal(found, table[[2, 1]] @ table.T + 1)


def test_weights_are_widened_where_they_are_used(tmp_path):
    bf16_graph(tmp_path / "model.onnx")
    twin = onnx.load_from_string(fp32_twin(tmp_path / "model.onnx"))
    kinds = [node.op_type for node in twin.graph.node]
    assert kinds == ["Gather", "Cast", "Cast", "Gemm", "Cast", "Add", "Cast"]
    assert twin.graph.node[0].input[0] == twin.graph.node[2].input[0] == "table"
    assert {weight.data_type for weight in twin.graph.initializer} == {TensorProto.BFLOAT16}
