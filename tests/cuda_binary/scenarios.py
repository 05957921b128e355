"""Scenarios, run in the process that has the CUDA provider."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dsbd_errors import DsbdError
from dsbd_forward.forward import Forward
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.device.cuda_device import CudaDevice, import_cuda_runtime
from dsbd_runtime.device.ort_engine import cuda_options, open_on_provider
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.engine.providers import find_provider
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.loading import load_causal_lm
from dsbd_runtime.ort.ort_module import import_ort
from lab.gpu.forward_times import milliseconds_of
from tests.cuda_binary.cuda_runtime import StandIn

_WAITS = ("wait ", "copy-and-wait ", "fill-and-wait ")


def open_model(standin: StandIn, path: str, role: str = "target", **options: Any) -> dict[str, Any]:
    """Open a model and close it; return the class and the text of the error, both empty without."""
    try:
        load_causal_lm(
            open_bundle(Path(path)), role, provider="cuda", settings=EngineSettings(**options)
        ).close()
    except DsbdError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": "", "text": ""}


def count_forwards(
    standin: StandIn, path: str, role: str, sizes: list[int], **options: Any
) -> list[dict[str, Any]]:
    """Return what a third forward of each number of rows does, and then a prune."""
    with load_causal_lm(
        open_bundle(Path(path)), role, provider="cuda", settings=EngineSettings(**options)
    ) as model:
        forward(model, 100)
        found = []
        for size in sizes:
            for _ in range(3):
                model.keep(np.arange(100))
                standin.take_log()
                forward(model, size)
            found.append(counts(standin.take_log()))
        for _ in range(3):
            forward(model, 3)
            standin.take_log()
            model.keep(np.delete(np.arange(model.num_rows), 98))
        found.append(counts(standin.take_log()))
        return found


def forward(model: CausalLM, num_rows: int) -> Any:
    """Append rows that see all before them; each has logits, at most 32."""
    first = model.num_rows
    mask = np.concatenate(
        [np.ones((num_rows, first), np.bool_), np.tri(num_rows, dtype=np.bool_)], axis=1
    )
    return model.forward(
        Forward(
            token_ids=np.arange(num_rows) % 3,
            positions=np.arange(first, first + num_rows),
            mask=mask,
            logit_rows=np.arange(min(num_rows, 32)),
        )
    )


def counts(log: list[str]) -> dict[str, int]:
    """Return launches, copies, waits, takes of memory, graphs launched and refusals of a log."""

    def count(*starts: str) -> int:
        return sum(line.startswith(starts) for line in log)

    return {
        "launches": count("kernel ", "product ", "graph "),
        "copies_in": sum(
            "pinned to device" in line or "pageable to device" in line for line in log
        ),
        "copies_out": sum("device to p" in line for line in log),
        "copies_within": sum("device to device" in line for line in log),
        "waits": count(*_WAITS),
        "takes": count("take "),
        "graphs": count("graph "),
        "refused": count("refused "),
    }


def open_with_memory(standin: StandIn, path: str, num_bytes: int) -> dict[str, Any]:
    """Open a target on a GPU of so much memory; return the error and what stays taken."""
    used = standin.used_memory
    standin.limit_memory(used + num_bytes)
    try:
        return {**open_model(standin, path), "left": standin.used_memory - used}
    finally:
        standin.limit_memory(80 << 30)


def run_with_memory(
    standin: StandIn, path: str, num_bytes: int, num_rows: list[int]
) -> dict[str, Any]:
    """Open a target, then leave so much memory; return the errors of forwards that keep nothing."""
    with load_causal_lm(open_bundle(Path(path)), "target", provider="cuda") as model:
        forward(model, 20)
        standin.limit_memory(standin.used_memory + num_bytes)
        errors = []
        standin.take_log()
        try:
            for num in num_rows:
                errors.append(_error_of(lambda num=num: forward(model, num)))
                model.keep(np.arange(20))
        finally:
            standin.limit_memory(80 << 30)
        log = standin.take_log()
        errors.append(_error_of(lambda: forward(model, 20)))
    return {
        "errors": errors,
        "captures": standin.num_captures,
        "graphs": standin.num_graphs,
        "replayed": counts(log)["graphs"],
    }


def fail_a_kernel(standin: StandIn, path: str, num_before: int, **options: Any) -> dict[str, Any]:
    """Let a kernel fail in a forward after others; return the error, and that of ``close``."""
    model = load_causal_lm(
        open_bundle(Path(path)), "target", provider="cuda", settings=EngineSettings(**options)
    )
    try:
        for _ in range(num_before):
            forward(model, 4)
        standin.fail_kernels("Norm")
        error = _error_of(lambda: forward(model, 4))
        again = _error_of(lambda: forward(model, 4))
        closing = _error_of(model.close)
    finally:
        standin.recover()
    return {"error": error, "again": again, "closing": closing}


def use_from_threads(standin: StandIn, path: str, num_threads: int) -> list[dict[str, int]]:
    """Return what each thread's four forwards and four prunes do, one thread after the other."""
    found: list[dict[str, int]] = []

    def work(model: CausalLM) -> None:
        for _ in range(4):
            forward(model, 4)
            model.keep(np.delete(np.arange(model.num_rows), model.num_rows - 3))

    with load_causal_lm(open_bundle(Path(path)), "target", provider="cuda") as model:
        forward(model, 40)
        for _ in range(num_threads):
            model.keep(np.arange(40))
            standin.take_log()
            thread = threading.Thread(target=work, args=(model,))
            thread.start()
            thread.join()
            found.append(counts(standin.take_log()))
    return found


def time_settings(standin: StandIn, path: str) -> dict[str, dict[str, int]]:
    """Return what the laboratory's timing of forwards does, with CUDA graphs and without."""
    found = {}
    for name, has_graphs in (("as it is", True), ("--no-cuda-graphs", False)):
        settings = EngineSettings(cuda_graphs=has_graphs)
        with load_causal_lm(
            open_bundle(Path(path)), "target", provider="cuda", settings=settings
        ) as model:
            standin.take_log()
            milliseconds_of(model, model.context_length // 2, num_rounds=2, calls_a_round=3)
            found[name] = counts(standin.take_log())
    return found


def captured_copies(standin: StandIn, path: str, role: str) -> list[str]:
    """Return the copies between host and device that recording forwards and prunes has met."""
    with load_causal_lm(open_bundle(Path(path)), role, provider="cuda") as model:
        forward(model, 40)
        standin.take_log()
        for size in (1, 8, 32):
            for _ in range(3):
                model.keep(np.arange(40))
                forward(model, size)
        log = standin.take_log()
    return [
        line
        for line in log
        if line.startswith("captured ") and ("host function" in line or " p" in line)
    ]


def _error_of(call: Callable[[], object]) -> str:
    """Return class and text of what a call raises; empty where it does not."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def open_graph(standin: StandIn, path: str) -> dict[str, str]:
    """Open one file on the provider; return the class and the text of the error."""
    provider = find_provider("cuda")
    device = CudaDevice(0, import_cuda_runtime(provider.install_line))
    try:
        open_on_provider(
            import_ort(), Path(path), provider, cuda_options(device), "", device.free_bytes
        )
    except DsbdError as error:
        return {"error": type(error).__name__, "text": str(error)}
    finally:
        device.close()
    return {"error": "", "text": ""}
