"""A tiny attention model as a forest-contract ONNX graph made by hand, and a bundle around it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import tokenizers
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dsbd_runtime.bundle_files.bundle import (
    MODEL_FILE,
    PRUNE_FILE,
    ROLES,
    TOKENIZER_FILE,
    ModelEntry,
    ParityReport,
    write_manifest,
)
from dsbd_runtime.bundle_files.staging import new_bundle
from dsbd_runtime.parts.attention.attention_rows import (
    ATTENTION_MASK,
    ATTENTION_MASK_SLIDING,
    INPUT_IDS,
    POSITION_IDS,
    SRC_ROWS,
    WRITE_INDICES,
)
from dsbd_runtime.parts.attention.cache_entries import (
    KEY,
    VALUE,
    equal_caches,
    past_name,
    present_name,
)
from dsbd_runtime.parts.feature.feature_memory import (
    FEATURE_INDEX,
    FEATURE_ROWS,
    FEATURES,
    OWN_FEATURES,
    TARGET_FEATURES,
)
from dsbd_runtime.parts.feature.features import FeatureEntry
from dsbd_runtime.parts.head.head import LOGIT_ROWS, LOGITS, parse_num_top_logits
from tests.runtime.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer

ONNX_TYPES = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16}
NUMPY_TYPES = {"fp32": np.float32, "fp16": np.float16}


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """Sizes and seed of a tiny model: embeddings, attention layers, a head; no MLP, no norm.

    With a sliding window the odd layers are sliding. A target with features returns what enters
    their layers; a feature draft adds that of the parent to its embeddings. Without ``full_logits``
    a graph with a top-k head lacks the output logits, as in bundles of schema version 2.
    """

    seed: int = 0
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    context_length: int = 2048
    vocab_size: int = VOCAB_SIZE
    sliding_window: int | None = None
    dtype: str = "fp32"
    logits: str = "full"
    full_logits: bool = True
    features: FeatureEntry | None = None

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    def is_sliding(self, layer: int) -> bool:
        return self.sliding_window is not None and layer % 2 == 1

    def weights(self) -> dict[str, NDArray[np.float32]]:
        kv_width = self.num_kv_heads * self.head_dim
        shapes = {
            "tokens": (self.vocab_size, self.width),
            "positions": (self.context_length, self.width),
            "head": (self.width, self.vocab_size),
        }
        for layer in range(self.num_layers):
            shapes[f"query.{layer}"] = (self.width, self.width)
            shapes[f"key.{layer}"] = (self.width, kv_width)
            shapes[f"value.{layer}"] = (self.width, kv_width)
            shapes[f"out.{layer}"] = (self.width, self.width)
        if self.is_feature_draft:
            assert self.features is not None
            shapes["fc"] = (self.features.width, self.width)
        rng = np.random.default_rng(self.seed)
        return {
            name: (rng.standard_normal(shape) * 1.3 / np.sqrt(self.width)).astype(np.float32)
            for name, shape in shapes.items()
        }

    @property
    def is_feature_draft(self) -> bool:
        return self.features is not None and self.features.own_width is not None

    def entry(self) -> ModelEntry:
        sliding = [] if self.sliding_window is None else [ATTENTION_MASK_SLIDING]
        return ModelEntry(
            family="tiny",
            vocab_size=self.vocab_size,
            bos_token_id=256,
            eos_token_ids=[257],
            context_length=self.context_length,
            num_layers=self.num_layers,
            caches=equal_caches(
                self.num_layers,
                num_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                dtype=self.dtype,
            ),
            dtype=self.dtype,
            quantization="none",
            logits=self.logits,
            full_logits=self.full_logits,
            masks=[ATTENTION_MASK, *sliding],
            sliding_window=self.sliding_window,
            features=self.features,
            parity=ParityReport(
                measure="max_abs_error",
                limit=1e-4,
                max_abs_error=0.0,
                mean_kl=0.0,
                top1_agreement=1.0,
                cases=[],
            ),
        )


def write_engine(model: TinyModel, path: Path) -> None:
    """Write the model's ONNX file, its weights next to it as ``<name>.data``."""
    constants = {
        "query_shape": [1, -1, model.num_heads, model.head_dim],
        "kv_shape": [1, -1, model.num_kv_heads, model.head_dim],
        "flat_shape": [1, -1, model.width],
        "rows_shape": [-1, model.width],
        "first_axis": [0],
    }
    nodes = [
        helper.make_node("Gather", ["tokens", INPUT_IDS], ["x_tokens"]),
        helper.make_node("Gather", ["positions", POSITION_IDS], ["x_positions"]),
        helper.make_node(
            "Add", ["x_tokens", "x_positions"], ["x_own" if model.is_feature_draft else "x.0"]
        ),
    ]
    constants["zeros_shape"] = [1, model.width]
    feature_nodes = _feature_nodes(model)
    if model.is_feature_draft:  # they come first, except the last, which is their output
        nodes += feature_nodes[:-1]
    for layer in range(model.num_layers):
        nodes += _layer_nodes(model, layer)
    nodes += feature_nodes[-1:] if model.is_feature_draft else feature_nodes
    nodes += [
        helper.make_node("Gather", [f"x.{model.num_layers}", LOGIT_ROWS], ["x_r"], axis=1),
        helper.make_node("Reshape", ["x_r", "rows_shape"], ["x_rows"]),
        helper.make_node("MatMul", ["x_rows", "head"], ["raw_logits"]),
        helper.make_node("Cast", ["raw_logits"], [LOGITS], to=TensorProto.FLOAT),
    ]
    inputs = [
        _info(INPUT_IDS, TensorProto.INT64, [1, "S"]),
        _info(POSITION_IDS, TensorProto.INT64, [1, "S"]),
        *(_info(mask, TensorProto.BOOL, [1, 1, "S", "C"]) for mask in model.entry().masks),
        _info(WRITE_INDICES, TensorProto.INT64, [1]),
        _info(LOGIT_ROWS, TensorProto.INT64, ["R"]),
        *_feature_inputs(model),
    ]
    logits = _info(LOGITS, TensorProto.FLOAT, ["R", model.vocab_size])
    initializers = [
        numpy_helper.from_array(weight.astype(NUMPY_TYPES[model.dtype]), name)
        for name, weight in model.weights().items()
    ] + [numpy_helper.from_array(np.array(v, np.int64), name) for name, v in constants.items()]
    past, present = _cache_infos(model)
    outputs = [logits, *present]
    if model.features is not None:
        shape = ["F", model.features.own_width or model.features.width]
        outputs.append(_info(FEATURES, ONNX_TYPES[model.dtype], shape))
    _save(nodes, [*inputs, *past], outputs, initializers, path)
    _append_head(model, path)


def _append_head(model: TinyModel, path: Path) -> None:
    """Put the head on a graph that ``dsbd-export`` does, whose modules import torch."""
    if num_candidates := parse_num_top_logits(model.logits):
        from dsbd_export.parts.head import append_topk_head

        append_topk_head(path, num_candidates)
        if not model.full_logits:
            _drop_output(path, LOGITS)


def _feature_inputs(model: TinyModel) -> list[onnx.ValueInfoProto]:
    if model.features is None:
        return []
    if not model.is_feature_draft:
        return [_info(FEATURE_ROWS, TensorProto.INT64, ["F"])]
    dtype = ONNX_TYPES[model.dtype]
    return [
        _info(TARGET_FEATURES, dtype, ["F", model.features.width]),
        _info(OWN_FEATURES, dtype, ["P", model.width]),
        _info(FEATURE_INDEX, TensorProto.INT64, ["S"]),
    ]


def _feature_nodes(model: TinyModel) -> list[onnx.NodeProto]:
    if model.features is None:
        return []
    if not model.is_feature_draft:
        assert model.features.layers is not None
        layers = [f"x.{layer}" for layer in model.features.layers]
        return [
            helper.make_node("Concat", layers, ["x_layers"], axis=2),
            helper.make_node("Gather", ["x_layers", FEATURE_ROWS], ["x_f"], axis=1),
            helper.make_node("Squeeze", ["x_f", "first_axis"], [FEATURES]),
        ]
    last = f"x.{model.num_layers}"
    return [
        helper.make_node("MatMul", [TARGET_FEATURES, "fc"], ["x_target"]),
        helper.make_node("ConstantOfShape", ["zeros_shape"], ["x_zeros_fp32"]),
        helper.make_node("Cast", ["x_zeros_fp32"], ["x_zeros"], to=ONNX_TYPES[model.dtype]),
        helper.make_node("Concat", ["x_target", OWN_FEATURES, "x_zeros"], ["x_all"], axis=0),
        helper.make_node("Gather", ["x_all", FEATURE_INDEX], ["x_parents"]),  # -1: the last
        helper.make_node("Add", ["x_own", "x_parents"], ["x.0"]),
        helper.make_node("Squeeze", [last, "first_axis"], [FEATURES]),
    ]


def _drop_output(path: Path, name: str) -> None:
    model = onnx.load(path, load_external_data=False)
    [position] = [i for i, output in enumerate(model.graph.output) if output.name == name]
    del model.graph.output[position]
    onnx.save(model, path)


def write_prune_graph(model: TinyModel, path: Path) -> None:
    """Write the graph that moves rows ``src_rows`` of every cache to ``write_indices``."""
    nodes = []
    for layer in range(model.num_layers):
        for part in (KEY, VALUE):
            past, present = past_name(layer, part), present_name(layer, part)
            moved = f"moved.{layer}.{part}"
            nodes += [
                helper.make_node("Gather", [past, SRC_ROWS], [moved], axis=2),
                helper.make_node("TensorScatter", [past, moved, WRITE_INDICES], [present], axis=2),
            ]
    inputs = [
        _info(SRC_ROWS, TensorProto.INT64, ["K"]),
        _info(WRITE_INDICES, TensorProto.INT64, [1]),
    ]
    past_infos, present_infos = _cache_infos(model)
    _save(nodes, [*inputs, *past_infos], present_infos, [], path)


def write_tiny_bundle(
    path: Path,
    *,
    target: TinyModel | None = None,
    draft: TinyModel | None = None,
    tokenizer: tokenizers.Tokenizer | None = None,
) -> Path:
    """Write a complete bundle at ``path``, and return it; by default each byte is a token."""
    models_by_role = {"target": target or TinyModel(), "draft": draft or TinyModel(seed=1)}
    with new_bundle(path) as folder:
        for role in ROLES:
            (folder / role).mkdir()
            write_engine(models_by_role[role], folder / role / MODEL_FILE)
            write_prune_graph(models_by_role[role], folder / role / PRUNE_FILE)
        (tokenizer or tiny_tokenizer()).save(str(folder / TOKENIZER_FILE))
        write_manifest(
            folder,
            versions={"onnx": onnx.__version__},
            target=models_by_role["target"].entry(),
            draft=models_by_role["draft"].entry(),
        )
    return path


def _layer_nodes(model: TinyModel, layer: int) -> list[onnx.NodeProto]:
    x, nodes = f"x.{layer}", []
    for part, shape in (("query", "query_shape"), ("key", "kv_shape"), ("value", "kv_shape")):
        name = f"{part}.{layer}"
        nodes += [
            helper.make_node("MatMul", [x, name], [f"{name}.flat"]),
            helper.make_node("Reshape", [f"{name}.flat", shape], [f"{name}.split"]),
            helper.make_node("Transpose", [f"{name}.split"], [f"{name}.heads"], perm=[0, 2, 1, 3]),
        ]
    for part in (KEY, VALUE):
        past, present = past_name(layer, part), present_name(layer, part)
        new = f"{part}.{layer}.heads"
        nodes.append(
            helper.make_node("TensorScatter", [past, new, WRITE_INDICES], [present], axis=2)
        )
    sliding = model.is_sliding(layer)
    mask = ATTENTION_MASK_SLIDING if sliding else ATTENTION_MASK
    caches = [present_name(layer, part) for part in (KEY, VALUE)]
    seen = f"seen.{layer}"
    return [
        *nodes,
        helper.make_node("Attention", [f"query.{layer}.heads", *caches, mask], [seen]),
        helper.make_node("Transpose", [seen], [f"{seen}.split"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", [f"{seen}.split", "flat_shape"], [f"{seen}.flat"]),
        helper.make_node("MatMul", [f"{seen}.flat", f"out.{layer}"], [f"{seen}.out"]),
        helper.make_node("Add", [x, f"{seen}.out"], [f"x.{layer + 1}"]),
    ]


def _cache_infos(model: TinyModel) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
    shape = [1, model.num_kv_heads, "C", model.head_dim]
    layers_and_parts = [(i, p) for i in range(model.num_layers) for p in (KEY, VALUE)]
    dtype = ONNX_TYPES[model.dtype]
    return (
        [_info(past_name(i, p), dtype, shape) for i, p in layers_and_parts],
        [_info(present_name(i, p), dtype, shape) for i, p in layers_and_parts],
    )


def _info(name: str, dtype: int, shape: list[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def _save(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    initializers: list[onnx.TensorProto],
    path: Path,
) -> None:
    proto = helper.make_model(
        helper.make_graph(nodes, "tiny", inputs, outputs, initializers),
        opset_imports=[helper.make_opsetid("", 24)],
        ir_version=11,
    )
    onnx.checker.check_model(proto)
    # ONNX Runtime wants the constants of Reshape inside the file: only weights go next to it.
    onnx.save_model(
        proto,
        path,
        save_as_external_data=bool(initializers),
        location=f"{path.name}.data",
        size_threshold=1024,
    )
