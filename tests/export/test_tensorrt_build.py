"""TensorRT engines built for real, without a GPU: tensorrt_rtx needs none to build."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from dsbd_export.errors import ExportError
from dsbd_export.tensorrt.tensorrt_build import (
    FORWARD_PROFILES,
    add_engines,
    add_profiles,
    build_model_engines,
    build_plan,
    builder_config,
    check_buildable,
    default_capacity,
    move_profiles,
)
from dsbd_export.tensorrt.tensorrt_graph import network_problems, parse_network, tensorrt_graph
from dsbd_export.tensorrt.tensorrt_options import BuildPlace, TensorrtOptions, build_place
from dsbd_runtime.bundle_files.bundle import ROLES, open_bundle
from dsbd_runtime.errors import ProviderError
from dsbd_runtime.parts.attention_rows import MAX_FORWARD_ROWS
from dsbd_runtime.tensorrt.trt_module import trt_logger
from dsbd_runtime.tensorrt.trt_record import ENGINE_FILES, find_record, source_hashes
from tests.ort_sessions import cpu_session
from tests.runtime.fake_trt import add_fake_engines
from tests.runtime.tiny_graph import TinyModel, write_engine, write_prune_graph, write_tiny_bundle

RTX = TensorrtOptions(engine="tensorrt-rtx", compute_capability="12.0")
CAPACITY = 320
HALF = TinyModel(num_layers=2, head_dim=16, dtype="fp16", sliding_window=8, context_length=300)


@pytest.fixture(scope="module")
def place() -> BuildPlace:
    return build_place(RTX)


def network_of(place: BuildPlace, model: onnx.ModelProto, file: Path) -> tuple[Any, Any]:
    builder = place.trt.Builder(trt_logger(place.trt, []))
    return builder, parse_network(place.trt, builder, model, file)


def inserted(graph: onnx.GraphProto, operator: str, tensor: str) -> None:
    """Put a node between a graph input and the TensorScatter that updates it."""
    scatter = next(
        node for node in graph.node if node.op_type == "TensorScatter" and tensor in node.input
    )
    scatter.input[0] = "copied"
    graph.node.insert(0, helper.make_node(operator, [tensor], ["copied"]))


def test_a_model_in_half_precision_gets_fused_attention_and_profiles(
    place: BuildPlace, tmp_path: Path
) -> None:
    file = tmp_path / "model.onnx"
    write_engine(HALF, file)
    plan, is_fused = build_plan(place, file, CAPACITY, (1, 8))
    assert is_fused and plan.nbytes > 10_000
    builder, network = network_of(place, tensorrt_graph(file, CAPACITY), file)
    config = builder.create_builder_config()
    profiles = []
    add_profiles(SpiedBuilder(builder, profiles), config, network, FORWARD_PROFILES)
    assert (
        config.num_optimization_profiles == len(FORWARD_PROFILES)
        and FORWARD_PROFILES[-1] == MAX_FORWARD_ROWS
    )
    for profile, most in zip(profiles, FORWARD_PROFILES, strict=True):
        sizes = [tuple(shape) for shape in profile.get_shape("attention_mask")]
        assert sizes == [(1, 1, n, CAPACITY) for n in (1, most, most)]
        assert [tuple(shape) for shape in profile.get_shape("logit_rows")] == [(1,), *[(most,)] * 2]


def test_no_wide_forward_runs_in_a_profile_of_more_than_twice_its_rows() -> None:
    for smaller, larger in itertools.pairwise(FORWARD_PROFILES[2:]):
        assert larger <= 2 * smaller


def test_fp32_is_not_computed_in_tf32(place: BuildPlace) -> None:
    builder = place.trt.Builder(trt_logger(place.trt, []))
    flag = place.trt.BuilderFlag.TF32
    assert builder.create_builder_config().get_flag(flag)  # what TensorRT does by itself
    assert not builder_config(place.trt, builder).get_flag(flag)


@pytest.mark.parametrize(
    ("context", "capacity"),
    [(100, 256), (300, 320), (4000, 4032), (4096, 4096), (131_072, 4096)],
)
def test_the_default_capacity_is_bounded(context: int, capacity: int) -> None:
    assert default_capacity(context) == capacity


class SpiedBuilder:
    """Keeps the profiles that it makes."""

    def __init__(self, builder: Any, profiles: list[Any]) -> None:
        self._builder, self._profiles = builder, profiles

    def create_optimization_profile(self) -> Any:
        self._profiles.append(self._builder.create_optimization_profile())
        return self._profiles[-1]


def test_fp32_has_no_fused_attention_and_is_built_in_pieces(
    place: BuildPlace, tmp_path: Path
) -> None:
    file = tmp_path / "model.onnx"
    write_engine(TinyModel(num_layers=2, head_dim=16, logits="topk:8"), file)
    assert not build_plan(place, file, CAPACITY, (8,))[1]


def test_caches_that_are_not_updated_in_place_are_found(place: BuildPlace, tmp_path: Path) -> None:
    for write, first in ((write_engine, "model.onnx"), (write_prune_graph, "prune.onnx")):
        file = tmp_path / first
        write(HALF, file)
        right = tensorrt_graph(file, CAPACITY)
        _, network = network_of(place, right, file)
        assert list(network_problems(place.trt, network, right.graph)) == []
        one_more = onnx.GraphProto()
        one_more.CopyFrom(right.graph)
        one_more.node.add(op_type="TensorScatter", input=["old"], output=["new"])
        one_more.node.add(op_type="Attention")
        problems = list(network_problems(place.trt, network, one_more))
        assert "4 layers KV_CACHE_UPDATE of 5 nodes TensorScatter" in problems
        wrong = tensorrt_graph(file, CAPACITY)
        inserted(wrong.graph, "Neg", "past_key_values.1.key")
        with pytest.raises(ExportError, match=f"{first}.*: .*; export with engine='onnx'"):
            network_of(place, wrong, file)


def test_an_update_with_the_outputs_is_found(place: BuildPlace) -> None:
    def layer(part: str, is_output: bool) -> Any:
        tensors = [SimpleNamespace(name=f"past_key_values.0.{part}", is_network_input=True)]
        tensors.append(SimpleNamespace(name=f"present.0.{part}", is_network_output=is_output))
        return SimpleNamespace(
            type=place.trt.LayerType.KV_CACHE_UPDATE,
            get_input=lambda _: tensors[0],
            get_output=lambda _: tensors[1],
        )

    graph = onnx.GraphProto(
        node=[
            onnx.NodeProto(
                op_type="TensorScatter",
                input=[f"past_key_values.0.{part}"],
                output=[f"present.0.{part}"],
            )
            for part in ("key", "value")
        ]
    )
    for is_output, num_problems in ((True, 0), (False, 1)):
        layers = [layer("key", True), layer("value", is_output)]
        network = SimpleNamespace(num_layers=2, get_layer=layers.__getitem__)
        problems = list(network_problems(place.trt, network, graph))
        wanted = "no cache update goes from input past_key_values.0.value straight to output"
        assert len(problems) == num_problems and all(wanted in text for text in problems)


def test_what_tensorrt_cannot_read_is_an_error_with_its_reason(
    place: BuildPlace, tmp_path: Path
) -> None:
    file = tmp_path / "prune.onnx"
    write_prune_graph(HALF, file)
    with pytest.raises(ExportError, match="static"):
        network_of(place, onnx.load(file), file)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_additive_masks_hide_the_same_rows(tmp_path: Path, dtype: str) -> None:
    file = tmp_path / "model.onnx"
    write_engine(dataclasses.replace(HALF, dtype=dtype), file)
    onnx.save(tensorrt_graph(file, CAPACITY), tmp_path / "static.onnx")
    rng = np.random.default_rng(0)
    numpy_type = {"fp32": np.float32, "fp16": np.float16}[dtype]
    inputs: dict[str, Any] = {
        "input_ids": rng.integers(0, 250, (1, 5)),
        "position_ids": np.arange(5)[None],
        "write_indices": np.array([3]),
        "logit_rows": np.arange(5),
    }
    for name in ("attention_mask", "attention_mask_sliding"):
        inputs[name] = rng.random((1, 1, 5, CAPACITY)) < 0.3
    for layer in range(2):
        for part in ("key", "value"):
            cache = rng.standard_normal((1, 2, CAPACITY, 16)).astype(numpy_type)
            inputs[f"past_key_values.{layer}.{part}"] = cache
    wanted, found = (
        cpu_session(path).run(["logits"], inputs) for path in (file, tmp_path / "static.onnx")
    )
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-5 if dtype == "fp32" else 0.02)
    assert np.abs(wanted[0]).max() > 0.5


def test_engines_are_added_to_a_bundle(tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    write_tiny_bundle(path, target=HALF, draft=dataclasses.replace(HALF, num_layers=1))
    before = add_fake_engines(path).manifest  # which are replaced
    lines: list[str] = []
    add_engines(path, RTX, report=lines.append)
    bundle = open_bundle(path, verify=True)
    assert bundle.manifest.target == before.target
    changed = before.files.items() ^ bundle.manifest.files.items()
    assert {Path(name).name for name, _ in changed} == set(ENGINE_FILES)
    for role in ROLES:
        record = find_record(bundle, role)
        assert record is not None and record.onnx_sha256 == source_hashes(bundle, role)
        assert (record.compute_capability, record.capacity) == ("12.0", CAPACITY)
        assert (record.step_profiles, record.attention) == (list(FORWARD_PROFILES), "fused")
        assert record.move_profiles == list(move_profiles(CAPACITY))
        assert f"{role}: attention is fused" in lines
    with pytest.raises(ExportError, match=r"9.0; tensorrt-rtx 1.*knows 7.5, 8.0"):
        add_engines(path, dataclasses.replace(RTX, compute_capability="9.0"), report=lines.append)
    assert open_bundle(path).manifest == bundle.manifest
    assert [file.name for file in tmp_path.iterdir()] == ["bundle"]


def test_an_exported_graph_is_built(exported, place, tmp_path):
    for name in ("model.onnx", "model.onnx.data", "prune.onnx"):
        (tmp_path / name).write_bytes((exported.config.output / "target" / name).read_bytes())
    record = build_model_engines(tmp_path, place, 256)
    assert record.attention == "decomposed"  # fp32
    assert set(record.onnx_sha256) == {"model.onnx", "model.onnx.data", "prune.onnx"}


def test_a_family_that_crashes_tensorrt_is_refused() -> None:
    entry = dataclasses.replace(TinyModel().entry(), family="diffllama")
    check_buildable("draft", TinyModel().entry())
    with pytest.raises(ExportError, match=r"crashes while it builds family diffllama .* the draft"):
        check_buildable("draft", entry)


def test_tensorrt_itself_says_how_to_install_it() -> None:
    with pytest.raises(ProviderError, match=r"in a checkout .* '\.\[tensorrt\]'"):
        build_place(TensorrtOptions(engine="tensorrt"))
