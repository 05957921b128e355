"""The algorithm: speculative beam decoding over any StepModel, in numpy alone."""

from dsbd_forward.engine import Engine as StepModel
from dsbd_forward.forward import Forward, ForwardResult
from dsbd_forward.logits import DenseLogits, TopLogits
from dsbd_forward.spec import EngineSpec, HeadSpec
from dsbd_ort.decoding.config import DecodingConfig, DecodingOptions
from dsbd_ort.decoding.decode import decode, decode_iterations
from dsbd_ort.decoding.errors import ConfigError, DecodingError, ModelError
from dsbd_ort.decoding.logits_processing.path_states import StopState
from dsbd_ort.decoding.request import DecodingRequest
from dsbd_ort.decoding.result import (
    DecodedSequence,
    DecodeResult,
    IterationOutput,
    WithResult,
    result_of,
)
from dsbd_ort.decoding.stats import DecodingStats
from dsbd_ort.decoding.strategies import STRATEGIES
from dsbd_ort.decoding.table_model import TableModel
from dsbd_ort.decoding.trace import (
    RequestTrace,
    TraceBeam,
    TraceIteration,
    TraceNode,
    TraceRecorder,
)

__all__ = [
    "STRATEGIES",
    "ConfigError",
    "DecodeResult",
    "IterationOutput",
    "DecodedSequence",
    "DecodingConfig",
    "DecodingOptions",
    "DecodingError",
    "DecodingRequest",
    "DecodingStats",
    "DenseLogits",
    "EngineSpec",
    "Forward",
    "ForwardResult",
    "HeadSpec",
    "ModelError",
    "RequestTrace",
    "StepModel",
    "StopState",
    "TableModel",
    "TopLogits",
    "TraceBeam",
    "TraceIteration",
    "TraceNode",
    "TraceRecorder",
    "WithResult",
    "decode",
    "decode_iterations",
    "result_of",
]
