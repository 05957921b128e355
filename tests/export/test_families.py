"""Every family of the table: one tiny random checkpoint, the whole parity gate."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM, HeliumConfig

from dsbd_export.capture.caches import probed_caches
from dsbd_export.capture.forest_graph import joined
from dsbd_export.capture.graph_checks import check_contract
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.families import FAMILIES, AttentionForm
from dsbd_export.checkpoints.model_loading import AbsentPart, load_model
from dsbd_export.config import ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity import MAX_ABS_ERROR, ParityLimit
from dsbd_export.given_prompt.kinds import GIVEN_KINDS
from dsbd_export.model_source import ModelSource
from dsbd_export.parity_cases import forest_cases, reference_logits, text_case
from dsbd_export.passes.webgpu_graph import use_webgpu_operators
from dsbd_runtime.bundle_files.manifest import ModelEntry
from dsbd_runtime.parts.attention.cache_entries import recurrent
from scripts.family_checkpoints import (
    CONVOLUTIONAL,
    FAMILY_CHECKPOINTS,
    NOT_EXACT,
    ONE_OF_EACH,
    RECURRENT,
    SOURCE_READERS,
    VOCAB_SIZE,
    WINDOW,
    write_checkpoint,
    write_family_checkpoint,
)
from scripts.family_matrix import PRECISIONS, Failure, build_engines_of, export_in
from scripts.path_ways import PathEngine, Way
from tests.export.conftest import opened
from tests.export.gate import (
    check_parity,
    count_positions_from_the_first_new_row,
    export_alone,
    references,
    rename_inputs,
)

KINDS = ["prefill", "decode", "tree"]
NEAR = "attention_mask_sliding"


# An attention node, one with a window on some layers, rotary angles from a table, softcap, experts
ENGINES_BUILT = ("llama", "qwen2", "gptj", "gemma2", "qwen2_moe")
AS_FP32 = [column for column, (dtype, *_) in PRECISIONS.items() if dtype == "fp32"][1:]


def form_of(graph: onnx.GraphProto) -> AttentionForm:
    chosen = {node.output[0] for node in graph.node if node.op_type == "Where"}
    for node in graph.node:  # in their order
        if node.op_type in ("Reshape", "Concat") and node.input[0] in chosen:
            chosen.add(node.output[0])
    softmaxes = [node for node in graph.node if node.op_type == "Softmax"]
    if any(node.input[0] in chosen for node in softmaxes):  # a router has one too
        return AttentionForm.CAPPED
    has_nodes = any(node.op_type == "Attention" for node in graph.node)
    return AttentionForm.NODE if has_nodes else AttentionForm.OWN


def expert_layers(checkpoint: Checkpoint) -> set[str]:
    """The modules that hold the weights of several experts, (experts, out, in)."""
    parameters = load_model(checkpoint).named_parameters()
    return {
        name.rpartition(".")[0]
        for name, weight in parameters
        if weight.ndim == 3 and weight.shape[1] > 1  # else of a convolution by channel
    }


def num_stacked_products(graph: onnx.GraphProto) -> int:
    """Products with a matrix for each expert of a layer, or for each head of its latents."""
    weights = {weight.name for weight in graph.initializer if len(weight.dims) == 3}
    weights |= {node.output[0] for node in graph.node if node.input and node.input[0] in weights}
    return sum(node.op_type == "MatMul" and node.input[1] in weights for node in graph.node)


def num_attentions_to_one_head(graph: onnx.GraphProto) -> int:
    """Those whose key is their value: rows that are not expanded to keys and values."""
    attentions = [node for node in graph.node if node.op_type == "Attention"]
    return sum(node.input[1] == node.input[2] for node in attentions)


NUM_TOKENS = 40  # beyond every sliding window


def difference_of_forms(model_file: Path, entry: ModelEntry) -> float:
    """Return the largest difference of a logit of the portable form and that for WebGPU.

    The same path by both, on the CPU: a prompt in one call, and calls of a forest.
    """
    model, for_webgpu = ir.load(model_file), model_file.parent / "webgpu.onnx"
    use_webgpu_operators(model, entry.context_length)
    ir.save(model, for_webgpu, external_data="webgpu.onnx.data")
    rng = np.random.default_rng(0)
    token_ids = rng.integers(0, entry.vocab_size, NUM_TOKENS)
    ways = [Way.plain(NUM_TOKENS), Way.drawn(NUM_TOKENS, rng)]
    found = []
    for file in (model_file, for_webgpu):
        engine, same = PathEngine(file, entry), np.random.default_rng(1)
        found.append(np.concatenate([engine.logits(token_ids, way, same) for way in ways]))
    assert np.ptp(found[0]) > 0.1
    return float(np.abs(found[0] - found[1]).max())


TAKE_A_SHAPE = {"Reshape", "Expand", "ConstantOfShape"}


def shape_arithmetic(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Nodes that compute shapes, which ONNX Runtime runs on the CPU and a GPU engine refuses."""
    shapes = {node.output[0] for node in graph.node if node.op_type in ("Shape", "Size")}
    return [
        node for node in graph.node if shapes & {*node.input} and node.op_type not in TAKE_A_SHAPE
    ]


NAMES = [
    name if row.is_quick else pytest.param(name, marks=pytest.mark.long)
    for name, row in FAMILY_CHECKPOINTS.items()
]


@pytest.mark.parametrize("name", NAMES)
def test_a_family_passes_the_whole_gate(name, captures, tmp_path):
    """In fp32; the form for WebGPU has its logits; one variant of the same capture then, exact."""
    row = FAMILY_CHECKPOINTS[name]
    folder = write_family_checkpoint(name, tmp_path / "checkpoint")
    checkpoint, entry, model = export_alone(folder, tmp_path, captures, max_context=row.max_context)
    family = FAMILIES[row.family]
    assert entry.family == row.family
    is_recurrent = name in RECURRENT
    assert is_recurrent == bool(recurrent(entry.caches))
    assert entry.parity.max_abs_error < 5e-5  # half of what the gate lets pass
    window = [] if entry.sliding_window is None else [WINDOW + 17]
    lengths = sorted([1, 17, *window, 128])
    cases = [(case.prompt_length, case.name) for case in entry.parity.cases]
    forests = [(length, kind) for length in lengths for kind in KINDS]
    assert cases == [*forests, (checkpoint.context_length, "text")]
    if any(checkpoint.layer_masks):
        assert form_of(model.graph) is family.attention
    assert is_recurrent or not shape_arithmetic(model.graph)
    num_expert_layers = len(expert_layers(checkpoint))
    assert (num_expert_layers > 0) == family.has_experts
    num_latent_layers = num_attentions_to_one_head(model.graph)
    assert num_latent_layers == len(checkpoint.layer_masks) * ("latent" in family.note)
    # of experts up, with gates, and down; of latents into their space and out of it
    assert num_stacked_products(model.graph) == 2 * (num_expert_layers + num_latent_layers)
    assert ("window" in family.note) >= (entry.sliding_window is not None)
    if name not in (*RECURRENT, *CONVOLUTIONAL):
        assert difference_of_forms(tmp_path / "target" / "model.onnx", entry) < 2e-5
    if name in ONE_OF_EACH:
        column = AS_FP32[ONE_OF_EACH.index(name) % len(AS_FP32)]
        check_exact(name, export_in(column, name, folder, tmp_path / column, captures))


@pytest.mark.parametrize(
    "name", [name for name, row in FAMILY_CHECKPOINTS.items() if not row.is_quick]
)
def test_a_family_opens_and_tells_what_its_layers_cache(name, tmp_path):
    """The cheap form of what ``-m long`` exports."""
    row = FAMILY_CHECKPOINTS[name]
    folder = write_family_checkpoint(name, tmp_path / "checkpoint")
    checkpoint = opened(folder, max_context=row.max_context)
    assert checkpoint.family == row.family
    caches = probed_caches(load_model(checkpoint, "fp16"), checkpoint, "fp16")
    num_layers = len(checkpoint.layer_masks) - getattr(checkpoint.config, "num_kv_shared_layers", 0)
    types = getattr(checkpoint.config, "layer_types", None) or ["full_attention"] * num_layers
    keeping = [layer for layer in range(num_layers) if types[layer] not in ("mlp", "moe")]
    assert sorted({cache.layer for cache in caches}) == keeping


def check_exact(name: str, result: float | Failure) -> None:
    is_refused = isinstance(result, Failure) and result.is_for_want_of_exact_attention
    assert is_refused if name in NOT_EXACT else not isinstance(result, Failure), result


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_family_passes_in_every_precision(name, captures, tmp_path):
    folder = write_family_checkpoint(name, tmp_path / "checkpoint")
    for column in AS_FP32:
        check_exact(name, export_in(column, name, folder, tmp_path / column, captures))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ENGINES_BUILT else pytest.mark.slow)
        for name in ONE_OF_EACH
    ],
)
def test_a_family_passes_in_fp16_and_engines_are_built_of_it(name, captures, tmp_path):
    checkpoint = write_family_checkpoint(name, tmp_path / "checkpoint")
    parity = export_in("fp16 KL", name, checkpoint, tmp_path / "fp16", captures)
    assert not isinstance(parity, Failure), parity
    if name in (*RECURRENT, *CONVOLUTIONAL, "diffllama"):
        return  # only the CPU folds; TensorRT for RTX 1.7 ends the process: refused by name
    pytest.importorskip("tensorrt_rtx")
    attention = build_engines_of(tmp_path / "fp16" / "target")
    assert not isinstance(attention, Failure), attention


HELIUM = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "max_position_embeddings": 64,
}


def test_a_family_that_is_not_in_the_table_is_tried(tmp_path):
    folder = write_checkpoint(tmp_path / "checkpoint", HeliumConfig(**HELIUM, pad_token_id=0))
    _, entry, model = export_alone(folder, tmp_path)
    assert "helium" not in FAMILIES
    assert (entry.family, form_of(model.graph)) == ("helium", AttentionForm.NODE)
    assert entry.parity.max_abs_error < 5e-5


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_an_epsilon_of_1e_8_stays_in_the_norms(dtype, tmp_path):
    """A padding token's embedding is zero: without epsilon its norm is not a number."""
    folder = write_checkpoint(tmp_path / "checkpoint", HeliumConfig(**HELIUM, rms_norm_eps=1e-8))
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][forest_cases(opened(folder))[0].node_ids] = 0
    save_file(weights, file, metadata={"format": "pt"})
    _, entry, model = export_alone(folder, tmp_path, dtype=dtype)
    operators = Counter(node.op_type for node in model.graph.node)
    assert operators["RMSNormalization"] == 3
    assert entry.parity.max_abs_error < (5e-5 if dtype == "fp32" else 0.1)


def test_the_table_and_the_checkpoints_are_about_the_same_families():
    supported = {name: family for name, family in FAMILIES.items() if family.refusal is None}
    of_encoders = {name for name, family in supported.items() if family.reads_source}
    of_prompts = GIVEN_KINDS.keys()  # see tests/given
    decoders = supported.keys() - of_encoders - of_prompts
    assert {row.family for row in FAMILY_CHECKPOINTS.values()} == decoders
    assert of_prompts <= supported.keys()
    others = {"whisper", "vision-encoder-decoder"}  # see test_speech.py, tests/picture_readers
    assert {row.family for row in SOURCE_READERS.values()} == of_encoders - others
    assert list(FAMILIES) == sorted(FAMILIES)


def see_everything(graph: onnx.GraphProto) -> None:
    rename_inputs(graph, **{NEAR: "attention_mask"})


def see_the_window_everywhere(graph: onnx.GraphProto) -> None:
    rename_inputs(graph, attention_mask=NEAR)


WRONG_MASKS = [see_everything, see_the_window_everywhere]
MUTATIONS = [  # (mutation, the first case that must fail)
    (see_everything, "prefill after 17 tokens"),
    (see_the_window_everywhere, "prefill after 17 tokens"),
    (count_positions_from_the_first_new_row, "decode after 1 tokens"),
]


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_wrong_masks_and_positions_fail_with_a_sliding_window(name, captures, tmp_path):
    folder = write_family_checkpoint(name, tmp_path / "checkpoint")
    checkpoint, _, model = export_alone(folder, tmp_path, captures)
    wanted = references(load_model(checkpoint), checkpoint)
    limit = ParityLimit(MAX_ABS_ERROR, 1e-4)
    for mutate, words in MUTATIONS:
        mutated = onnx.ModelProto()
        mutated.CopyFrom(model)
        mutate(mutated.graph)
        if mutate in WRONG_MASKS:
            contract = joined(ModelSource(checkpoint).parts(ModelOptions()))
            with pytest.raises(ExportError, match="its layers attend with"):
                check_contract(ir.from_proto(mutated), contract, form_of(model.graph))
        onnx.save(mutated, tmp_path / "target" / "model.onnx")
        with pytest.raises(ExportError, match=f"case {words}"):
            check_parity(tmp_path / "target", checkpoint, wanted, limit)


def test_the_text_part_gives_the_logits_of_the_whole_and_names_unread_inputs(captures, tmp_path):
    """Cohere2-Vision scales its logits, which a text model of the same weights would not."""
    folder = write_family_checkpoint("cohere2_vision", tmp_path / "checkpoint")
    checkpoint, entry, _ = export_alone(folder, tmp_path, captures)
    model = load_model(checkpoint)
    whole = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32)
    case = text_case(checkpoint)
    ids = torch.from_numpy(case.node_ids[None])
    with torch.no_grad():
        wanted = whole.eval()(input_ids=ids).logits[0].numpy()[case.rows]
    assert abs(reference_logits(model, case) - wanted).max() < 1e-5
    left_out = {name for name, part in model.named_modules() if isinstance(part, AbsentPart)}
    assert left_out == {"model.vision_tower", "model.multi_modal_projector"}
    assert (entry.family, entry.unread_inputs) == ("cohere2_vision", ["image"])


def test_a_part_that_was_left_out_raises_when_called():
    with pytest.raises(ExportError, match="'vision_tower' for text alone"):
        AbsentPart("vision_tower")(torch.zeros(1))
