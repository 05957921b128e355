"""The algorithm: speculative beam decoding over any StepModel, in numpy alone."""

from dsbd_forward.engine import Engine
from dsbd_forward.forward import Forward as Forward
from dsbd_forward.forward import ForwardResult as ForwardResult
from dsbd_forward.logits import DenseLogits as DenseLogits
from dsbd_forward.logits import TopLogits as TopLogits
from dsbd_forward.spec import EngineSpec as EngineSpec
from dsbd_forward.spec import HeadSpec as HeadSpec
from dsbd_ort.decoding.config import DecodingConfig as DecodingConfig
from dsbd_ort.decoding.config import DecodingOptions as DecodingOptions
from dsbd_ort.decoding.errors import ConfigError as ConfigError
from dsbd_ort.decoding.errors import DecodingError as DecodingError
from dsbd_ort.decoding.errors import ModelError as ModelError
from dsbd_ort.decoding.logits_processing.path_states import StopState as StopState
from dsbd_ort.decoding.request import DecodingRequest as DecodingRequest
from dsbd_ort.decoding.result import DecodedSequence as DecodedSequence
from dsbd_ort.decoding.result import DecodeResult as DecodeResult
from dsbd_ort.decoding.result import IterationOutput as IterationOutput
from dsbd_ort.decoding.result import WithResult as WithResult
from dsbd_ort.decoding.result import result_of as result_of
from dsbd_ort.decoding.stats import DecodingStats as DecodingStats
from dsbd_ort.decoding.strategies import STRATEGIES as STRATEGIES
from dsbd_ort.decoding.table_model import TableModel as TableModel
from dsbd_ort.decoding.trace import RequestTrace as RequestTrace
from dsbd_ort.decoding.trace import TraceBeam as TraceBeam
from dsbd_ort.decoding.trace import TraceIteration as TraceIteration
from dsbd_ort.decoding.trace import TraceNode as TraceNode
from dsbd_ort.decoding.trace import TraceRecorder as TraceRecorder
from dsbd_ort.decoding.whole_requests import decode as decode
from dsbd_ort.decoding.whole_requests import decode_iterations as decode_iterations

StepModel = Engine
