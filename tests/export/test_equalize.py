"""Forms of products before int8: the same in fp32, much nearer in int8, and rows independent."""

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from dsbd_export.config import MICROSOFT_DOMAIN
from dsbd_export.passes.weighted_layers import Linear, find_embeddings, find_linears
from dsbd_export.quantization.equalize import NOTHING_EQUALIZED, EqualizedProducts, Equalizer
from dsbd_export.quantization.quantize import DynamicQuantizer, Quantized, quantize_graph
from dsbd_export.quantization.quantize_blockwise import BlockwiseQuantizer
from dsbd_export.quantization.row_forms import (
    FormChoice,
    RowForm,
    RowsOfProducts,
    block_of,
    int8_error,
    key_of,
    observed_rows,
    rotation,
    rows_of,
)
from tests.export.conftest import parsed_graph
from tests.ort_sessions import cpu_session

WIDTH, INNER, VOCAB = 128, 256, 90
LOUD = (3, 40, 41, 100)


def draw(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def loud_rows(loud: tuple[int, ...] = LOUD, num_rows: int = 64) -> NDArray[np.float32]:
    """Return normal numbers, (num_rows, WIDTH), with channels that are a hundred times larger."""
    rows = draw(0, num_rows, WIDTH)
    rows[:, list(loud)] *= 100
    return rows


def long_tails(num_rows: int = 64) -> NDArray[np.float32]:
    """Return rows (num_rows, WIDTH) of which each has other channels that are large."""
    return np.asarray(draw(0, num_rows, WIDTH) ** 5, np.float32)


WEIGHT = draw(1, 96, WIDTH)


def test_a_rotation_is_its_own_inverse():
    assert np.allclose(rotation(2) * 2**0.5, [[1, 1], [1, -1]])
    assert np.allclose(rotation(64) @ rotation(64), np.eye(64), atol=1e-6)
    assert [block_of(n) for n in (128, 576, 96, 64, 48, 16, 127)] == [64, 64, 32, 32, 16, 0, 0]


@pytest.mark.parametrize(
    "form", [RowForm(np.linspace(0.1, 9, WIDTH, dtype=np.float32)), RowForm(None, 32)]
)
def test_a_form_keeps_the_product(form):
    rows = loud_rows()
    found = form.of_rows(rows) @ form.of_weight(WEIGHT).T
    np.testing.assert_allclose(found, rows @ WEIGHT.T, rtol=1e-3, atol=1e-3)


def test_loud_channels_are_scaled_and_tails_rotated():
    def chosen(rows: NDArray[np.float32], **can: bool) -> tuple[RowForm, float]:
        options = {"can_scale": True, "can_rotate": True, **can}
        form = FormChoice().form(rows_of(rows), WEIGHT, **options)
        return form, int8_error(form, rows, WEIGHT) / int8_error(RowForm(), rows, WEIGHT)

    form, error = chosen(loud_rows(), can_rotate=False)
    assert form.scales is not None and form.scales[list(LOUD)].min() > 3 * np.median(form.scales)
    assert error < 0.2
    form, error = chosen(long_tails(), can_scale=False)
    assert form.block == 64 and form.scales is None and error < 0.5
    form, _ = chosen(long_tails(), can_scale=False, is_after_attention=True)
    assert not form.block  # whose errors matter less
    form, _ = chosen(draw(0, 64, WIDTH))
    assert not form.block  # normal numbers: as good as it gets
    form, _ = chosen(long_tails(), can_scale=False, can_rotate=False)
    assert form.scales is None and not form.block


def test_a_rotation_is_chosen_by_what_shares_a_scale():
    """A loud channel takes the integers of those that share its scale alone."""
    rows = rows_of(loud_rows((3,)))
    errors = [int8_error(RowForm(), rows.rows, WEIGHT, shared) for shared in (None, 64, 32)]
    by_hand = rows.rows.reshape(64, 2, 64)
    scales = np.abs(by_hand).max(-1, keepdims=True) / np.float32(127)
    rounded = (np.rint(by_hand / scales) * scales).reshape(64, WIDTH)
    blocks = WEIGHT.reshape(96, 2, 64)
    steps = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    weight = (np.rint(blocks / steps) * steps).reshape(96, WIDTH)
    wanted = rows.rows @ WEIGHT.T
    off = np.square(rounded @ weight.T - wanted).sum(1) / np.square(wanted).sum(1)
    assert errors[1] == pytest.approx(off.mean(), rel=1e-4)
    assert errors[0] > errors[1] > errors[2]


def test_channels_that_were_silent_are_not_magnified_without_bound():
    """Also those that a model was widened by: they must not drown the others."""
    rows = loud_rows()
    rows[:, 7] = 0
    form = FormChoice().form(rows_of(rows), WEIGHT, can_scale=True, can_rotate=False)
    assert form.scales is not None and form.scales[7] > 0.05 * np.median(form.scales)
    rows, weight = loud_rows(), WEIGHT.copy()
    silent = np.arange(WIDTH) % 4 != 0
    rows[:, silent] = 0
    weight[:, silent] = 0
    form = FormChoice().form(rows_of(rows), weight, can_scale=True, can_rotate=False)
    assert form.scales is not None and form.scales.max() < 1e4 * form.scales.min()


def test_the_form_of_a_head_keeps_what_is_likely_or_looked_up():
    """A constant channel that makes 900 tokens unlikely, and that all embeddings hold."""
    rows = loud_rows((3,))
    rows[:, 7] = 1
    head = np.concatenate([WEIGHT, np.zeros((900, WIDTH), np.float32)])
    head[:96, 7], head[96:, 7] = 0.02, -300
    lost = {}
    for knows in (True, False):
        form = FormChoice(shared=64).form(
            rows_of(rows), head, can_scale=True, can_rotate=True, is_head=knows, is_looked_up=knows
        )
        formed = form.of_weight(head[:96]).reshape(96, 2, 64)
        steps = np.abs(formed).max(-1, keepdims=True) / np.float32(127)
        found = form.weight_of((np.rint(formed / steps) * steps).reshape(96, WIDTH))
        lost[knows] = np.abs(found - head[:96])[:, 7].mean()
    assert lost[True] < 0.01 <= lost[False]


def test_rows_of_products_are_observed_by_their_weights():
    model = nn.Sequential(nn.Linear(WIDTH, INNER), nn.Linear(INNER, 8))
    rows = loud_rows(num_rows=300)
    with torch.no_grad(), observed_rows(model) as found:
        model(torch.from_numpy(rows)[None])
    seen = found[key_of(model[0].weight.detach().numpy()[:1])]
    assert seen.rows.shape == (128, WIDTH) and np.array_equal(seen.largest, np.abs(rows).max(0))
    assert len(found) == 2 and not any(module._forward_pre_hooks for module in model)


def decoder(*, is_tied: bool, reads_norm: bool = False, is_merged: bool = True) -> ir.Model:
    """Return an embedding, a norm, a gated MLP and a head; ``reads_norm``: the norm is an output.

    is_merged: gate and up are one product, of flat rows, with a bias and stored by output.
    """
    weights = {
        "embedding": draw(2, VOCAB, WIDTH),
        "gain": 1 + loud_rows(num_rows=1)[0] / 10,
        "last_gain": 1 + draw(4, WIDTH) / 10,
        "gate_up": draw(5, 2 * INNER, WIDTH),
        "gate": draw(5, WIDTH, INNER),
        "up": draw(6, WIDTH, INNER),
        "bias": draw(7, 2 * INNER),
        "down": draw(8, INNER, WIDTH),
        "head": draw(9, WIDTH, VOCAB),
        "first": np.array([0]),
        "sizes": np.array([INNER, INNER]),
        "flat": np.array([-1, WIDTH]),
        "unflat": np.array([1, -1, WIDTH]),
    }
    if is_merged:
        shapes = f"float[S,{WIDTH}] flat_rows, float[S,{INNER}] inner"
        both = """flat_rows = Reshape(rows, flat)
            both = Gemm <transB = 1> (flat_rows, gate_up, bias)
            g, u = Split <axis = -1> (both, sizes)"""
    else:
        shapes, both = f"float[1,S,{INNER}] inner", "g = MatMul(rows, gate) u = MatMul(rows, up)"
    rows = f"float[1,S,{WIDTH}] rows"
    model = parsed_graph(
        f"""(int64[1,S] input_ids, int64[R] logit_rows)
            => (float[R,{VOCAB}] logits {", " + rows if reads_norm else ""})
        <float[1,S,{WIDTH}] x, float[1,S,{WIDTH}] last, float[1,R,{WIDTH}] chosen, {shapes}
            {"" if reads_norm else ", " + rows}> {{
            x = Gather(embedding, input_ids)
            rows = RMSNormalization <axis = -1> (x, gain)
            {both}
            s = Sigmoid(g)
            silu = Mul(g, s)
            inner = Mul(silu, u)
            flat_delta = MatMul(inner, down)
            delta = Reshape(flat_delta, unflat)
            y = Add(x, delta)
            last = RMSNormalization <axis = -1> (y, last_gain)
            chosen = Gather <axis = 1> (last, logit_rows)
            squeezed = Squeeze(chosen, first)
            {"tied = Transpose <perm = [1, 0]> (embedding)" if is_tied else ""}
            logits = MatMul(squeezed, {"tied" if is_tied else "head"})
        }}""",
        **weights,
    )
    return ir.from_proto(model)


def run(model: ir.Model, names: list[str], num_tokens: int = 20) -> list[NDArray[np.float32]]:
    feeds = {"input_ids": np.arange(num_tokens)[None], "logit_rows": np.arange(num_tokens)}
    return cpu_session(model).run(names, feeds)


def seen_in(**form: bool) -> RowsOfProducts:
    """Return the rows of the products of a decoder, as the checkpoint's modules would show them."""
    model = decoder(**form)
    linears = find_linears(model.graph)
    model.graph.outputs.extend(
        {linear.rows for linear in linears if not linear.rows.is_graph_output()}
    )
    found: RowsOfProducts = {}
    for linear in linears:
        assert linear.rows.name is not None and linear.weight.const_value is not None
        [rows] = run(model, [linear.rows.name], 60)
        weight = linear.weight.const_value.numpy()
        key = key_of(weight if linear.is_stored_by_output else weight.T)
        found[key] = rows_of(rows.reshape(-1, rows.shape[-1]))
    return found


class Both(FormChoice):
    def form(self, seen, weight, *, can_scale, can_rotate, is_after_attention=False, **_):
        assert len(seen.largest) == weight.shape[1] and not is_after_attention
        scales = np.exp(draw(3, weight.shape[1])) if can_scale else None
        return RowForm(scales, block_of(weight.shape[1]) if can_rotate else 0)


def both_forms(model: ir.Model, seen: RowsOfProducts) -> tuple[Equalizer, list[Linear]]:
    linears = find_linears(model.graph)
    equalizer = Equalizer(model.graph, linears, find_embeddings(model.graph), seen, Both())
    after = equalizer.equalize()
    assert [each.node for each in after] == [each.node for each in linears]
    return equalizer, after


def assert_near(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=2e-5 * np.abs(wanted).max())


FORMS = [{"is_tied": True}, {"is_tied": False, "is_merged": False}, {"is_tied": False}]


@pytest.mark.parametrize("form", FORMS)
def test_in_fp32_the_graph_computes_the_same(form):
    model = decoder(**form)
    [wanted] = run(model, ["logits"])
    done = both_forms(model, seen_in(**form))[0].done
    assert done == EqualizedProducts(num_scaled=3, num_rotated=3)
    assert_near(run(model, ["logits"])[0], wanted)


def test_rows_that_something_else_reads_are_not_scaled():
    model = decoder(is_tied=False, reads_norm=True)
    [wanted] = run(model, ["rows"])
    done = both_forms(model, seen_in(is_tied=False, reads_norm=True))[0].done
    assert done == EqualizedProducts(num_scaled=2, num_rotated=3)
    assert np.array_equal(run(model, ["rows"])[0], wanted)


def test_layers_that_share_a_norm_get_scales_of_their_own():
    """Constants of equal values are one initializer in a graph."""
    model = decoder(is_tied=False)
    norms = [node for node in model.graph if node.op_type == "RMSNormalization"]
    norms[1].replace_input_with(1, norms[0].inputs[1])
    [wanted] = run(model, ["logits"])
    assert both_forms(model, seen_in(is_tied=False))[0].done.num_scaled == 3
    assert_near(run(model, ["logits"])[0], wanted)


KINDS = ["int8-dynamic", "int8"]


def quantized(kind: str = "int8-dynamic", **form: bool) -> tuple[ir.Model, Quantized]:
    model = decoder(**form)
    return model, quantize_graph(model, kind, is_exact=True, rows=seen_in(**form))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_int8_is_nearer_in_these_forms(form, kind):
    [wanted] = run(decoder(**form), ["logits"])
    as_it_is = decoder(**form)
    done = quantize_graph(as_it_is, kind, is_exact=True)
    assert done.equalized == NOTHING_EQUALIZED and "scaled" not in str(done)
    model, done = quantized(kind, **form)
    assert done.equalized.num_scaled and f"{done.equalized.num_scaled} groups scaled" in str(done)
    before, after = (
        np.square(run(each, ["logits"])[0] - wanted).mean() for each in (as_it_is, model)
    )
    assert after < 0.5 * before


def test_what_is_written_warns_of_nothing():
    """A shape without a type is left out when a graph is written, with a line for the user."""
    model, _ = quantized(is_tied=True)
    values = [value for node in model.graph for value in node.outputs]
    assert not [value for value in values if value.shape is not None and value.type is None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbours(kind):
    """The first product of rows is one of few rows and of many, rotated in blocks."""
    form = {"is_tied": True}
    model = decoder(**form)
    equalizer = Equalizer(
        model.graph,
        find_linears(model.graph),
        find_embeddings(model.graph),
        seen_in(**form),
        Both(),
    )
    linears, embeddings = equalizer.equalize(), equalizer.embeddings
    if kind == "int8":
        blocks = BlockwiseQuantizer(model.graph, is_exact=True)
        model.graph.opset_imports[MICROSOFT_DOMAIN] = 1
        for linear in linears:
            blocks.quantize_linear(linear, 8)
        blocks.quantize_embedding(embeddings[0])
    else:
        quantizer = DynamicQuantizer(model.graph)
        for linear in linears:
            quantizer.quantize_linear(linear, is_shared=linear.weight is embeddings[0].inputs[0])
        quantizer.quantize_embedding(embeddings[0])
    [whole] = run(model, ["logits"], 33)
    for size in (1, 2, 5, 20):
        assert np.array_equal(run(model, ["logits"], size)[0], whole[:size])
    assert run(model, ["logits"], 0)[0].shape == (0, VOCAB)


def test_a_row_of_zeros_has_a_product_of_zeros():
    model = decoder(is_tied=False, is_merged=False)
    embedding = model.graph.initializers["embedding"]
    assert embedding.const_value is not None
    values = embedding.const_value.numpy().copy()
    values[1] = 0
    embedding.const_value = ir.tensor(values, name="embedding")
    quantize_graph(model, "int8-dynamic", is_exact=True)
    [found] = run(model, ["logits"])
    assert np.isfinite(found).all() and not found[1].any() and found[2].any()
