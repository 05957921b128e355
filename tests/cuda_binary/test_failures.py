"""Little memory and failing kernels: the right errors, nothing stuck, nothing left."""

import pytest

pytestmark = [pytest.mark.cuda_binary, pytest.mark.slow]  # a wheel of 256 MB, 45 s


@pytest.mark.parametrize("num_bytes", [0, 100_000, 5_000_000])
def test_too_little_memory_for_the_weights(worker, fp16_bundle, num_bytes):
    found = worker.run("open_with_memory", path=fp16_bundle, num_bytes=num_bytes)
    assert (found["error"], found["left"]) == ("CapacityError", 0)
    assert (
        "which takes 10," in found["text"] and f"; {num_bytes:,} bytes were free" in found["text"]
    )


@pytest.mark.parametrize("num_bytes", [0, 500_000, 2_000_000])
def test_too_little_memory_for_calls_and_growth(worker, fp16_bundle, num_bytes):
    found = worker.run(
        "run_with_memory", path=fp16_bundle, num_bytes=num_bytes, num_rows=[4, 4, 4, 8, 32, 200]
    )
    *errors, afterwards = found["errors"]
    assert errors[-1].startswith("CapacityError: "), errors
    assert {error.split(":")[0] for error in errors} <= {"", "CapacityError"}
    assert afterwards == ""
    assert (found["captures"], found["graphs"]) == (0, 0)


@pytest.mark.parametrize("num_before", [0, 1, 2, 5])
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_kernel_fails(worker, fp16_bundle, num_before, cuda_graphs):
    found = worker.run(
        "fail_a_kernel", path=fp16_bundle, num_before=num_before, cuda_graphs=cuda_graphs
    )
    for error in (found["error"], found["again"]):
        assert error.startswith("EngineError: ")
        assert "an illegal memory access was encountered" in error
        assert "start the process again" in error
    assert found["closing"] == ""
    assert worker.run("open_model", path=fp16_bundle)["error"] == ""
