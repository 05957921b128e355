"""TensorRT engines opened, refused, and run over a fake ``trt`` that computes with ONNX Runtime."""

import importlib.util
import re

import numpy as np
import pytest

from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.engine.providers import Placement, find_provider, parse_placement
from dsbd_runtime.engine.session import EngineOptions
from dsbd_runtime.errors import BundleError, CapacityError, DsbdError, ProviderError
from dsbd_runtime.loading import check_available, load_causal_lm
from dsbd_runtime.tensorrt.trt_engine import open_trt_session
from tests.runtime.fake_trt import CAPACITY, STEPS, FakeGpu, FakeTrt, add_fake_engines
from tests.runtime.model_calls import chain, logits_of
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

RTX = find_provider("tensorrt-rtx")


def opened(bundle, trt=None, gpu=None, provider=RTX):
    request = EngineOptions(bundle=bundle, role="target", placement=Placement(provider, 0))
    return open_trt_session(request, trt=trt or FakeTrt(), cuda_runtime=gpu or FakeGpu())


@pytest.fixture(autouse=True)
def no_kernels_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def bundle(bundle_copy):
    return add_fake_engines(bundle_copy)


def test_steps_and_moves_give_what_the_cpu_gives(bundle):
    trt, gpu = FakeTrt(), FakeGpu()
    entry = bundle.entry("target")
    with (
        CausalLM(opened(bundle, trt, gpu), entry) as model,
        load_causal_lm(bundle, "target") as on_cpu,
    ):
        for num_rows in (300, 1, 5, 9):
            tokens, positions, mask = chain(num_rows, model.num_rows)
            asked = np.array([num_rows - 1, 0])
            found, wanted = (logits_of(m, tokens, positions, mask, asked) for m in (model, on_cpu))
            np.testing.assert_allclose(found, wanted, atol=1e-5)
            kept = np.delete(np.arange(model.num_rows), [model.num_rows - 3, 7])[-200:]
            for one in (model, on_cpu):
                one.keep(np.concatenate([[0, 1], kept]) if num_rows == 300 else np.r_[0:150])
        assert model.kv_bytes == 2 * 2 * 2 * CAPACITY * 8 * 4  # layers, parts, heads, dims, bytes
    assert gpu.live == {} and gpu.streams == []


@pytest.mark.parametrize("full_logits", [True, False])
def test_full_logits_of_a_plan_with_a_topk_head(tmp_path, full_logits):
    target = TinyModel(logits="topk:8", full_logits=full_logits)
    write_tiny_bundle(tmp_path / "bundle", target=target)
    bundle, gpu = add_fake_engines(tmp_path / "bundle"), FakeGpu()
    with (
        CausalLM(opened(bundle, gpu=gpu), bundle.entry("target")) as model,
        load_causal_lm(bundle, "target") as on_cpu,
    ):
        for num_rows in (9, 1, 9):
            asked = np.arange(num_rows)
            found, wanted = (
                logits_of(m, *chain(num_rows, m.num_rows), asked) for m in (model, on_cpu)
            )
            np.testing.assert_array_equal(found.top_ids, wanted.top_ids)
            assert (found.full is not None) == (wanted.full is not None) == full_logits
            if full_logits:
                rows = asked[::-1]
                np.testing.assert_allclose(found.full.read(rows), wanted.full.read(rows), atol=1e-5)
    assert gpu.live == {} and gpu.streams == []


def test_a_size_is_set_once_and_then_only_executed(bundle):
    trt = FakeTrt()
    with CausalLM(opened(bundle, trt), bundle.entry("target")) as model:
        for _ in range(3):
            logits_of(model, *chain(5, model.num_rows), np.array([0]))
        [context] = trt.plans[0].contexts
        methods = [method for method, _ in context.log]
        assert context.log[0] == ("set_optimization_profile_async", STEPS.index(8))
        assert methods[-3:] == ["execute_async_v3"] * 3 and methods.count("execute_async_v3") == 3
        assert methods.count("set_tensor_address") == len(trt.plans[0].infos)
        logits_of(model, *chain(40, model.num_rows), np.array([0]))  # another profile and context
        assert trt.plans[0].contexts[1].log[0] == ("set_optimization_profile_async", 3)
        logits_of(model, *chain(2, model.num_rows), np.array([0]))  # the first one, another size
        assert context.log[-1][0] == "execute_async_v3" and len(context.log) > len(methods) + 1


MISFITS = [  # (what the record says, the machine, words of the message)
    ({"tensorrt_version": "1.6.0"}, {}, "version 1.6.0, here is 1.7.1"),
    ({}, {"gpu": FakeGpu("8.9")}, "compute capability 12.0, here is 8.9"),
    ({"onnx_sha256": {"model.onnx": "0"}}, {}, "model.onnx has changed since it was built"),
    ({"flavour": "tensorrt"}, {}, "built with tensorrt, not with tensorrt-rtx"),
]


@pytest.mark.parametrize(("changes", "machine", "words"), MISFITS)
def test_an_engine_that_does_not_fit_is_refused_with_the_command(
    bundle_copy, changes, machine, words
):
    bundle = add_fake_engines(bundle_copy, **changes)
    gpu = machine.get("gpu", FakeGpu())
    with pytest.raises(BundleError) as error:
        opened(bundle, gpu=gpu)
    capability = ".".join(gpu.numbers.values())
    assert words in str(error.value)
    assert str(error.value).endswith(
        f"build it with: dsbd-export --bundle {bundle_copy} --engine tensorrt-rtx "
        f"--compute-capability {capability} --capacity {CAPACITY}"
    )
    assert gpu.streams == []


def test_a_bundle_without_engines_names_the_command(tiny_bundle):
    words = f"has no tensorrt engine; build it with: dsbd-export --bundle {tiny_bundle.path} "
    with pytest.raises(BundleError, match=words + "--engine tensorrt$"):
        opened(tiny_bundle, provider=find_provider("tensorrt"))


def test_a_cache_that_is_not_updated_in_place_is_refused(bundle):
    for wrong in (None, "past_key_values.1.key"):
        trt = FakeTrt()
        trt.aliases["present.1.value"] = wrong
        with pytest.raises(BundleError, match=f"writes present.1.value to the memory of {wrong}"):
            opened(bundle, trt)


def test_what_tensorrt_refuses_is_an_error_with_its_reason(bundle):
    trt = FakeTrt()
    trt.can_load = False
    with pytest.raises(BundleError, match=r"engine.plan \(another serialization version\)"):
        opened(bundle, trt)
    for method in ("set_input_shape", "set_tensor_address", "execute_async_v3"):
        trt = FakeTrt()
        trt.refuses.add(method)
        with CausalLM(opened(bundle), bundle.entry("target")) as model:
            logits_of(model, *chain(3), np.array([0]))
        model = CausalLM(opened(bundle, trt), bundle.entry("target"))
        with pytest.raises(DsbdError, match=f"no {method}"):
            logits_of(model, *chain(3), np.array([0]))


def test_what_does_not_fit_is_a_capacity_error(bundle):
    model = CausalLM(opened(bundle), bundle.entry("target"))
    logits_of(model, *chain(CAPACITY), np.array([0]))  # full, the last rows without padding
    with pytest.raises(CapacityError, match=f"{CAPACITY + 1} cache rows do not fit"):
        logits_of(model, *chain(1, CAPACITY), np.array([0]))
    assert model.num_rows == CAPACITY
    trt = FakeTrt()
    trt.has_memory = False
    model = CausalLM(opened(bundle, trt), bundle.entry("target"))
    with pytest.raises(CapacityError, match="no device memory to run"):
        logits_of(model, *chain(1), np.array([0]))


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="it is installed")
def test_a_missing_tensorrt_says_how_to_get_it(bundle):
    placement = parse_placement("tensorrt")
    request = EngineOptions(bundle=bundle, role="target", placement=placement)
    for refused in (lambda: check_available(placement), lambda: open_trt_session(request)):
        with pytest.raises(ProviderError, match=r"needs the package tensorrt, .* '\.\[tensorrt\]'"):
            refused()


WRONG_RECORDS = [  # (changes, what is said)
    ({"capacity": 512}, r"caches of 320 rows, engine\.json says 512"),
    ({"step_profiles": [8, 256]}, r"4 optimization profiles, engine\.json says 2"),
    ({"step_profiles": [8, 1]}, "step_profiles is"),
    ({"move_profiles": [CAPACITY + 1]}, "move_profiles is"),
    ({"flavour": "other"}, "flavour is 'other', expected one of tensorrt, tensorrt-rtx"),
    ({"capacity": "many"}, "capacity is 'many', expected int"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG_RECORDS)
def test_a_record_that_cannot_be_right_is_refused(bundle_copy, changes, words):
    with pytest.raises(BundleError, match=words):
        opened(add_fake_engines(bundle_copy, **changes))


def test_a_missing_plan_is_a_missing_file_of_the_bundle(bundle):
    (bundle.path / "target" / "prune.plan").unlink()
    with pytest.raises(BundleError, match=r"prune.plan is missing"):
        open_bundle(bundle.path)


def test_the_contexts_of_a_plan_share_scratch_of_the_largest_profile(bundle):
    trt, gpu = FakeTrt(), FakeGpu()
    with CausalLM(opened(bundle, trt, gpu), bundle.entry("target")) as model:
        for num_rows in (200, 1, 20):
            logits_of(model, *chain(num_rows, model.num_rows), np.array([0]))
        model.keep(np.arange(1, 200))
        for plan, num_contexts in zip(trt.plans, (3, 1), strict=True):
            assert len(plan.contexts) == num_contexts
            (scratch,) = {context.scratch for context in plan.contexts}
            assert gpu.live[scratch].nbytes == plan.device_memory_size_v2
    assert gpu.live == {}


def test_compiled_kernels_are_kept_for_the_next_opening(bundle, tmp_path):
    opened(bundle).close()
    files = sorted(tmp_path.glob("cache/dsbd-ort/*"))
    assert len(files) == 2  # of the model and of the prune graph
    assert all(re.match(r"tensorrt-rtx-1\.7\.1-sm12\.0-\w{16}\.kernels", f.name) for f in files)
    assert {file.read_bytes() for file in files} == {b"compiled"}
    files[0].write_bytes(b"of another GPU")
    opened(bundle).close()
    assert files[0].read_bytes() == b"compiled"


USED = {  # names of the package by the class that has them
    "ICudaEngine": "create_runtime_config device_memory_size_v2",
    "IExecutionContext": "set_device_memory",
    "IRuntimeCache": "serialize deserialize",
    "IRuntimeConfig": "create_runtime_cache dynamic_shapes_kernel_specialization_strategy "
    "set_execution_context_allocation_strategy set_runtime_cache",
    "ExecutionContextAllocationStrategy": "USER_MANAGED",
    "DynamicShapesKernelSpecializationStrategy": "EAGER",
}


def test_the_real_package_has_what_a_context_is_made_with():
    trt = pytest.importorskip("tensorrt_rtx")
    for owner, names in USED.items():
        for name in names.split():
            assert hasattr(getattr(trt, owner), name), name
