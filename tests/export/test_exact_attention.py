"""Exact attention: the same bits for a path however it is computed, and what the sums hold."""

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from dsbd_export.errors import ExportError
from dsbd_export.passes.exact_attention import IntegerSums, attend_exactly
from dsbd_export.passes.weighted_layers import Store
from dsbd_export.pipeline import export_bundle
from dsbd_export.progress import silent
from dsbd_runtime.bundle_files.bundle import open_bundle
from scripts.family_checkpoints import FAMILY_CHECKPOINTS, SOURCE_READERS, write_family_checkpoint
from scripts.path_ways import PathEngine, count_differing
from tests.export.conftest import parsed_graph
from tests.export.gate import export_alone
from tests.ort_sessions import cpu_session

NUM_TOKENS, NUM_WAYS = 90, 16
LOOSE = 10.0  # random weights make distributions that no quantization keeps


@pytest.fixture(scope="module")
def bundles(exported_others, captures, tmp_path_factory):
    """Qwen2 with a window on one layer and Mistral, by quantization and attention."""
    made = {("none", "fused"): exported_others.config.output}

    def bundle(quantize, attention):
        if (quantize, attention) not in made:
            output = tmp_path_factory.mktemp("exact") / "bundle"
            options = {"quantize": quantize, "attention": attention, "output": output}
            options["max_kl"] = None if quantize == "none" else LOOSE
            config = replace(exported_others.config, **options)
            export_bundle(config, report=silent, source_of=captures)
            made[quantize, attention] = output
        return open_bundle(made[quantize, attention])

    return bundle


def differing(bundle, role):
    engine = PathEngine(bundle.model_path(role), bundle.entry(role))
    found = count_differing(engine, num_tokens=NUM_TOKENS, num_ways=NUM_WAYS)
    return found.num_other_ways


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(
    "precision",
    [("int8-dynamic", None), ("none", "exact"), ("int8-blocks", "exact"), ("int4", "exact")],
)
def test_logits_depend_on_the_path_alone(bundles, precision, role):
    bundle = bundles(*precision)
    assert differing(bundle, role) == 0
    assert bundle.entry(role).bit_exact == "observed"


@pytest.mark.parametrize("precision", [("int8-dynamic", "fused"), ("none", "fused")])
def test_fused_attention_depends_on_more(bundles, precision):
    bundle = bundles(*precision)
    assert differing(bundle, "target") > NUM_WAYS / 2
    assert bundle.entry("target").bit_exact is False


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["int8-blocks", "int4"])
def test_fused_attention_in_blocks_claims_what_was_observed(bundles, bits):
    """Whether bits differ depends on the processor: with VNNI those of 8 bits did not."""
    bundle = bundles(bits, None)
    claim = bundle.entry("target").bit_exact
    assert claim is False or (claim == "observed" and differing(bundle, "target") == 0)


def value_of(name, *shape, dtype=ir.DataType.FLOAT):
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


SCATTERED = "float[1, 2, C, 8] past, float[1, 2, S, 8] new, int64[1] row"


def caching(inputs: str, outputs: str, steps: str) -> ir.Model:
    """Return a graph whose last output is the cached value of layer 0."""
    text = f"""({SCATTERED} {inputs}) => ({outputs} float[1, 2, C, 8] present)
        {{ present = TensorScatter <axis = 2> (past, new, row) {steps} }}"""
    model = ir.from_proto(parsed_graph(text, zero=np.array([0]), last=np.array([-1])))
    model.graph.outputs[-1].name = "present.0.value"
    return model


def session_of_sums(context_length, num_rows, limit_of_values):
    """Return an engine of IntegerSums alone over cached values (1, 2, C, 8), and its Store."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 24}, name="sums")
    store = Store(graph, "exact")
    largest = np.full((2, 8), limit_of_values, np.float32)
    sums = IntegerSums(store, context_length, {0: largest})
    scores = value_of("scores", 1, 2, num_rows, "C")
    value, new = value_of("present.0.value", 1, 2, "C", 8), value_of("new", 1, 2, "S", 8)
    tape = ir.tape.Tape()
    attended, prepared = sums.attended(tape, scores, value), sums.prepare_value(tape, 0, new)
    attended.name, prepared.name = "attended", "prepared"
    for result in (attended, prepared):
        result.type = new.type
    graph.extend(tape.nodes)
    graph.inputs.extend([scores, value, new])
    graph.outputs.extend([attended, prepared])
    return cpu_session(ir.Model(graph, ir_version=10))


SHAPES_OF_SCORES = {
    "all equal": lambda rng, size: np.zeros(size, np.float32),
    "one row": lambda rng, size: np.eye(size[2], size[3], dtype=np.float32) * 90 + np.zeros(size),
    "a few": lambda rng, size: rng.standard_normal(size) * 5,
    "large": lambda rng, size: rng.standard_normal(size) + 900,
}


@pytest.mark.parametrize("kind", SHAPES_OF_SCORES)
@pytest.mark.parametrize("context_length", [256, 4096, 20000])
def test_integers_are_added_without_rounding(kind, context_length):
    """Half of the channels at their limit in every row: any order of rows gives the same bits."""
    rng = np.random.default_rng(0)
    engine = session_of_sums(context_length, 5, 3.0)
    nothing = {"scores": np.zeros((1, 2, 5, 1)), "present.0.value": np.zeros((1, 2, 1, 8))}
    feeds = {name: array.astype(np.float32) for name, array in nothing.items()}
    feeds["new"] = np.full((1, 2, 1, 8), 1e9, np.float32)
    limit = float(engine.run(["prepared"], feeds)[0].max())
    assert limit == {256: 510, 4096: 481, 20000: 392}[context_length]
    scores = SHAPES_OF_SCORES[kind](rng, (1, 2, 5, context_length)).astype(np.float32)
    values = np.full((1, 2, context_length, 8), limit, np.float32)
    values[..., 4:] = rng.integers(-limit, limit + 1, values[..., 4:].shape)
    feeds |= {"scores": scores, "present.0.value": values}
    wanted = engine.run(["attended"], feeds)[0]
    for _ in range(3):
        order = rng.permutation(context_length)
        feeds["scores"], feeds["present.0.value"] = scores[..., order], values[:, :, order]
        np.testing.assert_array_equal(engine.run(["attended"], feeds)[0], wanted)
    exact = np.exp(scores.astype(np.float64) - scores.max(-1, keepdims=True))
    exact = exact / exact.sum(-1, keepdims=True) @ values * (2 * 3.0 / limit)
    np.testing.assert_allclose(wanted, exact, atol=0.05)


def test_an_attention_that_nothing_shows():
    """A cached value that no softmax reads leaves the graph without bit-exact attention."""
    with pytest.raises(ExportError, match="0 attentions read the values of 1 layers"):
        attend_exactly(caching("", "", ""), 256, [0], None)


@pytest.mark.parametrize(
    ("context_length", "has_sink", "in_double"),
    [(4096, False, 0), (4096, True, 1), (4095, True, 0), (4097, False, 1)],
)
def test_a_sink_takes_a_column_only_where_there_is_one(context_length, has_sink, in_double):
    """Up to 4,096 columns are added up in fp32, and at most as many rows as the context has."""
    steps, weights = "shares = Softmax <axis = -1> (scores)", "shares"
    if has_sink:
        steps, weights = f"{steps} weights = Slice (shares, zero, last, last)", "weights"
    steps = f"{steps} attended = MatMul ({weights}, present)"
    model = caching(", float[1, 2, S, N] scores", "float[1, 2, S, 8] attended,", steps)
    attend_exactly(model, context_length, [0], {0: np.ones((2, 8), np.float32)})
    casts = [node.attributes.get_int("to") for node in model.graph if node.op_type == "Cast"]
    assert casts.count(ir.DataType.DOUBLE) == in_double


@pytest.mark.parametrize("quantize", ["int8", "int8-blocks"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("marian", "it reads a source"),
        ("qwen3_5", "it has recurrent layers"),
        ("deepseek_v3", "its values are computed from what is cached"),
    ],
)
def test_a_model_without_exact_form_says_so(name, reason, quantize, captures, tmp_path):
    folder = write_family_checkpoint(name, tmp_path / "checkpoint")
    length = {**FAMILY_CHECKPOINTS, **SOURCE_READERS}[name].max_context
    options = {"quantize": quantize, "max_context": length, "max_kl": LOOSE}
    report: list[str] = []
    _, entry, _ = export_alone(folder, tmp_path, captures, report.append, **options)
    assert entry.bit_exact is False
    assert entry.quantization == ("int8-dynamic" if quantize == "int8" else "int8")
    said = f"target: attention is fused, not exact as usual in {quantize}: {reason}"
    assert any(line.startswith(said) for line in report)
    words = r"attention='exact' (has no form|is not supported) for .*: .*fused"
    (other := tmp_path / "exact").mkdir()
    with pytest.raises(ExportError, match=words):
        export_alone(folder, other, captures, attention="exact", **options)
