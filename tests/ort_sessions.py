"""Sessions of ONNX Runtime that tests open themselves, with the product's own options."""

from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime as ort

from dsbd_runtime.ort.ort_module import LOG_ERRORS, import_ort, keep_int8_products_exact

Graph = Path | bytes | onnx.ModelProto | ir.Model


def cpu_session(
    graph: Graph, *, num_threads: int | None = None, log_severity: int = LOG_ERRORS
) -> ort.InferenceSession:
    """Open a graph on the CPU.

    Products of uint8 and int8 are exact on every processor: without the option of
    ``keep_int8_products_exact`` they saturate on an x86 without VNNI.
    """
    options: Any = import_ort().SessionOptions()
    options.log_severity_level = log_severity
    if num_threads is not None:
        options.intra_op_num_threads = num_threads
    keep_int8_products_exact(options)
    opened: Any = ort.InferenceSession(
        _path_or_bytes(graph), options, providers=["CPUExecutionProvider"]
    )
    return opened


def _path_or_bytes(graph: Graph) -> str | bytes:
    if isinstance(graph, Path):
        return str(graph)
    if isinstance(graph, ir.Model):
        graph = ir.serde.serialize_model(graph)
    return graph if isinstance(graph, bytes) else bytes(graph.SerializeToString())
