"""TensorRT engines built for real, without a GPU, and what is built for which GPU."""

import dataclasses
import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from dsbd_export.config import ExportConfig
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
    load_timing_cache,
    move_profiles,
    save_timing_cache,
    timing_cache_file,
)
from dsbd_export.tensorrt.tensorrt_graph import network_problems, parse_network, tensorrt_graph
from dsbd_export.tensorrt.tensorrt_options import BuildPlace, TensorrtOptions, build_place
from dsbd_runtime.bundle_files.bundle import ROLES, open_bundle
from dsbd_runtime.errors import ProviderError
from dsbd_runtime.parts.attention.attention_rows import MAX_FORWARD_ROWS
from dsbd_runtime.tensorrt.trt_module import FLAVOURS, import_trt, trt_logger, version_numbers
from dsbd_runtime.tensorrt.trt_record import ENGINE_FILES, find_record, source_hashes
from tests.ort_sessions import cpu_session
from tests.runtime.fake_trt import add_fake_engines
from tests.runtime.tiny_graph import TinyModel, write_engine, write_prune_graph, write_tiny_bundle

RTX = TensorrtOptions(engine="tensorrt-rtx", compute_capability="12.0")
CAPACITY = 320
HALF = TinyModel(num_layers=2, head_dim=16, dtype="fp16", sliding_window=8, context_length=300)


@pytest.fixture(scope="module")
def place():
    return build_place(RTX)


def network_of(place: BuildPlace, model: onnx.ModelProto, file: Path) -> tuple[Any, Any]:
    builder = place.trt.Builder(trt_logger(place.trt, []))
    return builder, parse_network(place.trt, builder, model, file)


def inserted(graph: onnx.GraphProto, operator: str, tensor: str) -> None:
    scatter = next(
        node for node in graph.node if node.op_type == "TensorScatter" and tensor in node.input
    )
    scatter.input[0] = "copied"
    graph.node.insert(0, helper.make_node(operator, [tensor], ["copied"]))


def test_a_model_in_half_precision_gets_fused_attention_and_profiles(place, tmp_path):
    file = tmp_path / "model.onnx"
    write_engine(HALF, file)
    plan, is_fused = build_plan(place, file, CAPACITY, (1, 8))
    assert is_fused and plan.nbytes > 10_000
    builder, network = network_of(place, tensorrt_graph(file, CAPACITY), file)
    config = builder.create_builder_config()
    profiles = []
    add_profiles(SpiedBuilder(builder, profiles), config, network, FORWARD_PROFILES)
    assert config.num_optimization_profiles == len(FORWARD_PROFILES)
    assert FORWARD_PROFILES[-1] == MAX_FORWARD_ROWS
    for profile, most in zip(profiles, FORWARD_PROFILES, strict=True):
        sizes = [tuple(shape) for shape in profile.get_shape("attention_mask")]
        assert sizes == [(1, 1, n, CAPACITY) for n in (1, most, most)]
        assert [tuple(shape) for shape in profile.get_shape("logit_rows")] == [(1,), *[(most,)] * 2]


def test_no_wide_forward_runs_in_a_profile_of_more_than_twice_its_rows():
    for smaller, larger in itertools.pairwise(FORWARD_PROFILES[2:]):
        assert larger <= 2 * smaller


def test_fp32_is_not_computed_in_tf32(place):
    builder = place.trt.Builder(trt_logger(place.trt, []))
    flag = place.trt.BuilderFlag.TF32
    assert builder.create_builder_config().get_flag(flag)  # what TensorRT does by itself
    assert not builder_config(place.trt, builder).get_flag(flag)


def test_the_default_capacity_is_bounded():
    found = {context: default_capacity(context) for context in (100, 300, 4000, 4096, 131_072)}
    assert found == {100: 256, 300: 320, 4000: 4032, 4096: 4096, 131_072: 4096}


class SpiedBuilder:
    def __init__(self, builder: Any, profiles: list[Any]) -> None:
        self._builder, self._profiles = builder, profiles

    def create_optimization_profile(self) -> Any:
        self._profiles.append(self._builder.create_optimization_profile())
        return self._profiles[-1]


def test_fp32_has_no_fused_attention_and_is_built_in_pieces(place, tmp_path):
    file = tmp_path / "model.onnx"
    write_engine(TinyModel(num_layers=2, head_dim=16, logits="topk:8"), file)
    assert not build_plan(place, file, CAPACITY, (8,))[1]


def test_caches_that_are_not_updated_in_place_are_found(place, tmp_path):
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


def test_an_update_with_the_outputs_is_found(place):
    def layer(part: str, is_output: bool) -> Any:
        tensors = [SimpleNamespace(name=f"past_key_values.0.{part}", is_network_input=True)]
        tensors.append(SimpleNamespace(name=f"present.0.{part}", is_network_output=is_output))
        return SimpleNamespace(
            type=place.trt.LayerType.KV_CACHE_UPDATE,
            get_input=lambda _: tensors[0],
            get_output=lambda _: tensors[1],
        )

    graph = onnx.GraphProto()
    for part in ("key", "value"):
        past, present = f"past_key_values.0.{part}", f"present.0.{part}"
        graph.node.add(op_type="TensorScatter", input=[past], output=[present])
    for is_output, num_problems in ((True, 0), (False, 1)):
        layers = [layer("key", True), layer("value", is_output)]
        network = SimpleNamespace(num_layers=2, get_layer=layers.__getitem__)
        problems = list(network_problems(place.trt, network, graph))
        wanted = "no cache update goes from input past_key_values.0.value straight to output"
        assert len(problems) == num_problems and all(wanted in text for text in problems)


def test_what_tensorrt_cannot_read_is_an_error_with_its_reason(place, tmp_path):
    file = tmp_path / "prune.onnx"
    write_prune_graph(HALF, file)
    with pytest.raises(ExportError, match="static"):
        network_of(place, onnx.load(file), file)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_additive_masks_hide_the_same_rows(tmp_path, dtype):
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


def test_engines_are_added_to_a_bundle(tmp_path):
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


UNBUILDABLE = [  # (changes of the entry, words)
    ({"family": "diffllama"}, r"crashes while it builds family diffllama .* the draft"),
    ({"form": "webgpu"}, r"the draft has the form webgpu, .* --form portable"),
]


@pytest.mark.parametrize(("changes", "words"), UNBUILDABLE)
def test_what_tensorrt_cannot_build_is_refused_by_name(changes, words):
    check_buildable("draft", TinyModel().entry())
    with pytest.raises(ExportError, match=words):
        check_buildable("draft", dataclasses.replace(TinyModel().entry(), **changes))


def test_tensorrt_itself_says_how_to_install_it():
    with pytest.raises(ProviderError, match=r"in a checkout .* '\.\[tensorrt\]'"):
        build_place(TensorrtOptions(engine="tensorrt"))


KNOWN = SimpleNamespace(__members__=dict.fromkeys(["NONE", "CURRENT", "SM89", "SM120"]))
FAKE_TRT: Any = SimpleNamespace(__version__="1.7.1", ComputeCapability=KNOWN)


def place_for(engine: str, wanted: str | None, here: str | None) -> BuildPlace:
    options = TensorrtOptions(engine=engine, compute_capability=wanted)
    return build_place(options, here=lambda _: here, import_module=lambda _: FAKE_TRT)


def test_an_export_hands_its_options_on():
    options = {"engine": "tensorrt-rtx", "capacity": 512}
    config = ExportConfig(target="t", output=Path("o"), **options)
    assert config.tensorrt == TensorrtOptions(**options)
    assert ExportConfig(target="t", output=Path("o")).tensorrt is None


PLACES = [  # (engine, the GPU that is wanted, that of this machine, that which is built for)
    ("tensorrt-rtx", "8.9", None, "8.9"),
    ("tensorrt-rtx", "8.9", "12.0", "8.9"),
    ("tensorrt-rtx", None, "12.0", "12.0"),
    ("tensorrt", None, "9.0", "9.0"),
    ("tensorrt", "9.0", "9.0", "9.0"),
]
NO_PLACES = [
    ("tensorrt-rtx", None, None, "one of 8.9, 12.0"),
    ("tensorrt-rtx", None, "9.0", "for compute capability 9.0; tensorrt-rtx 1.7.1 knows 8.9"),
    ("tensorrt", None, None, "run dsbd-export --bundle on the machine with the GPU"),
    ("tensorrt", "12.0", "9.0", "builds only for the GPU of this machine, 9.0"),
]


def test_what_is_built_for():
    for engine, wanted, here, built_for in PLACES:
        assert place_for(engine, wanted, here).compute_capability == built_for
    for engine, wanted, here, words in NO_PLACES:
        with pytest.raises(ExportError, match=re.escape(words)):
            place_for(engine, wanted, here)


def test_versions_are_compared_by_number_and_old_ones_refused():
    assert version_numbers("10.15.1rc2") == (10, 15, 1) and version_numbers("none") == ()
    assert version_numbers("10.9.0") < FLAVOURS["tensorrt"].oldest <= version_numbers("11.4.1")
    old: Any = SimpleNamespace(__version__="10.9.0")
    with pytest.raises(ProviderError, match=r"tensorrt 10\.9\.0 is too old, at least 10\.15"):
        import_trt(FLAVOURS["tensorrt"], lambda _: old)


class FakeConfig:
    def create_timing_cache(self, data: bytes) -> SimpleNamespace:
        return SimpleNamespace(data=data, serialize=lambda: data + b"1")

    def set_timing_cache(self, cache: SimpleNamespace, ignore_mismatch: bool) -> None:
        self.cache = cache


def test_kernel_times_are_kept_by_version_and_gpu(tmp_path):
    place = BuildPlace(FLAVOURS["tensorrt"], FAKE_TRT, "9.0")
    file = timing_cache_file(place, {"XDG_CACHE_HOME": str(tmp_path)})
    assert file == tmp_path / "dsbd-ort" / "tensorrt-1.7.1-sm9.0.timing"
    for read in (b"", b"1", b"11"):
        config = FakeConfig()
        cache = load_timing_cache(config, file)
        assert config.cache is cache and cache.data == read
        save_timing_cache(cache, file)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
