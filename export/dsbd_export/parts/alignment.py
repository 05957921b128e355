"""Alignment graph of a speech model: how some heads of its decoder attend to the sound.

It is the decoder's graph with another output; it uses the weights of model.onnx.data. It returns
the attention of the heads that follow the sound (``alignment_heads``), which shows when each token
is heard. Shapes: ``dsbd_runtime.parts.source.alignment``.

    alignment_weights = Softmax(scale * query @ cross.key^T)       of these heads, (A, S, N)
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from transformers import PreTrainedModel

from dsbd_export.capture.forest_graph import ExportContract, ExportPart, Made
from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity_engine import as_export_errors, parity_engine
from dsbd_export.parity_cases import ComputeIn, Reference, num_drawn
from dsbd_export.parts.sources import entry_of, fixed_sources
from dsbd_runtime.bundle_files.bundle import MODEL_FILE, Bundle
from dsbd_runtime.parts.head.head import LOGITS
from dsbd_runtime.parts.source.alignment import Alignment
from dsbd_runtime.parts.source.encoder_entry import SOURCE_LENGTHS, EncoderEntry, cross_name
from dsbd_runtime.parts.source.source_values import SourceValues
from dsbd_runtime.parts.source.speech_entry import (
    ALIGNMENT_FILE,
    ALIGNMENT_WEIGHTS,
    AlignmentEntry,
    SpeechEntry,
)

LIMIT = 1e-4
"""Largest error of an attention weight, which is between 0 and 1, in fp32."""
_NUM_TOKENS = 40  # tokens of a compared text
_PREFIX = "alignment."  # prefix of names inside the graph
_MEDIAN_FILTER_WIDTH = 7  # transformers' default for a config that names none


@dataclass(frozen=True)
class AlignmentCase:
    """A sound, tokens, and the checkpoint's attention weights."""

    sound: SourceValues
    token_ids: NDArray[np.int64]  # (S,) int64
    weights: NDArray[np.float32]  # (A, S, N) float32


class ExportedAlignment(ExportPart):
    """Attention of some heads to the sound, for a target whose checkpoint names these heads."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._cases: list[AlignmentCase] = []
        self._error = 0.0

    def contract(self) -> ExportContract:
        return ExportContract(entry={"encoder": with_alignment(self._checkpoint)})

    def refer(self, model: Any, references: list[Reference]) -> list[Reference]:
        self._cases = alignment_cases(model, self._checkpoint)
        return references

    def write(self, made: Made) -> None:
        checkpoint = self._checkpoint
        encoder = entry_of(checkpoint)
        made.report(f"{checkpoint.role}: comparing how it attends to the sound, for times of words")
        assert encoder.speech is not None  # as it has such heads
        write_alignment_graph(made.folder, encoder.speech)
        self._error = alignment_error(made.judged, checkpoint, self._cases)

    def complete(self, made: Made) -> dict[str, Any]:
        return {"encoder": with_alignment(self._checkpoint, self._error)}


def alignment_cases(model: PreTrainedModel, checkpoint: Checkpoint) -> list[AlignmentCase]:
    """Return the cases with which the graph is compared, [] if the bundle gets no such graph."""
    speech = aligned_speech(checkpoint)
    if speech is None:
        return []
    assert (
        checkpoint.encoder is not None and speech.alignment_heads is not None
    )  # checked by the caller
    heads = speech.alignment_heads
    rng = np.random.default_rng(4)
    length = min(_NUM_TOKENS, checkpoint.context_length)
    cases = []
    for sound in fixed_sources(checkpoint.encoder)[:2]:
        token_ids = rng.integers(0, num_drawn(checkpoint), length, dtype=np.int64)
        token_ids[0] = checkpoint.encoder.start_token_id
        with (
            torch.no_grad(),
            quiet_libraries(),
            ComputeIn(torch.float32),
            _eager_attention(model),
        ):
            layers = model(
                input_features=torch.from_numpy(sound.values[None].copy()),
                decoder_input_ids=torch.from_numpy(token_ids[None]),
                output_attentions=True,
                use_cache=False,
            ).cross_attentions
        weights = [layers[layer][0, head].float().numpy() for layer, head in heads]
        cases.append(AlignmentCase(sound, token_ids, np.stack(weights)))
    return cases


def aligned_speech(checkpoint: Checkpoint) -> SpeechEntry | None:
    """Return the speech entry of a target with alignment heads, None for other models."""
    encoder = checkpoint.encoder
    if encoder is None or encoder.speech is None or checkpoint.role != "target":
        return None
    return encoder.speech if encoder.speech.alignment_heads is not None else None


@contextlib.contextmanager
def _eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """In the block, make a model use the attention code that returns weights."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def with_alignment(checkpoint: Checkpoint, max_abs_error: float = 0.0) -> EncoderEntry:
    """Return the encoder's entry for a bundle with an alignment graph."""
    encoder = entry_of(checkpoint)
    assert encoder.speech is not None  # as it has such heads
    width = int(getattr(checkpoint.config, "median_filter_width", _MEDIAN_FILTER_WIDTH))
    entry = AlignmentEntry(median_filter_width=width, max_abs_error=max_abs_error)
    speech = replace(encoder.speech, alignment=entry)
    return replace(encoder, speech=speech)


def alignment_error(
    bundle: Bundle, checkpoint: Checkpoint, cases: Sequence[AlignmentCase]
) -> float:
    """Return the largest error of an attention weight; raise ExportError if it is too large."""
    errors = []
    with parity_engine(bundle, checkpoint.role) as engine:
        for case in cases:
            first, *others = case.token_ids.tolist()
            with as_export_errors():
                alignment = engine.model.part(Alignment).align(
                    case.sound, [first], [*others, first]
                )
            errors.append(float(np.abs(alignment.weights - case.weights[:, 1:]).max()))
    error = max(errors)  # without the first row
    is_exact = bundle.entry(checkpoint.role).quantization == "none"
    if is_exact and not error <= LIMIT:  # also when it is NaN
        raise ExportError(
            f"parity failed: the attention to the sound of the {checkpoint.role} (family "
            f"{checkpoint.family}) differs from the checkpoint's by {error:.3g}, the limit is "
            f"{LIMIT:g}; remove alignment_heads from generation_config.json to export without "
            "times of words"
        )
    return error


def write_alignment_graph(folder: Path, speech: SpeechEntry) -> None:
    """Write alignment.onnx next to a decoder's model.onnx, whose weights it uses."""
    assert speech.alignment_heads is not None  # the caller has asked
    heads = speech.alignment_heads
    model = onnx.load(folder / MODEL_FILE, load_external_data=False)
    graph = model.graph
    attentions = {node.input[1]: node for node in graph.node if node.op_type == "Attention"}
    parts = []
    for place, (layer, of_layer) in enumerate(_runs(heads)):
        key = cross_name(layer, "key")
        parts.append(_append_weights(graph, attentions[key], of_layer, f"{_PREFIX}{place}."))
    graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.int64), f"{_PREFIX}first"))
    graph.node.extend(
        [
            helper.make_node("Concat", parts, [f"{_PREFIX}weights"], axis=1),
            helper.make_node(
                "Squeeze", [f"{_PREFIX}weights", f"{_PREFIX}first"], [ALIGNMENT_WEIGHTS]
            ),
        ]
    )
    [logits] = [output for output in graph.output if output.name == LOGITS]
    weights = helper.make_tensor_value_info(
        ALIGNMENT_WEIGHTS, TensorProto.FLOAT, [len(heads), "S", None]
    )
    kept = onnx.ValueInfoProto()
    kept.CopyFrom(logits)
    del graph.output[:]
    graph.output.extend([weights, kept])
    onnx.save(model, folder / ALIGNMENT_FILE)


def _runs(heads: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[int]]]:
    """Yield runs of consecutive heads of the same layer, as the layer and its heads.

    [[1, 0], [1, 3], [2, 5]] gives (1, [0, 3]) and (2, [5]).
    """
    run: list[int] = []
    for index, (layer, head) in enumerate(heads):
        run.append(head)
        if index + 1 == len(heads) or heads[index + 1][0] != layer:
            yield layer, run
            run = []


def _append_weights(
    graph: onnx.GraphProto, attention: onnx.NodeProto, heads: list[int], prefix: str
) -> str:
    """Append nodes for some heads' weights over the sound, (1, A, S, N); return their name."""
    query, key, *_ = attention.input
    scale = next(each.f for each in attention.attribute if each.name == "scale")
    numbers = {
        "heads": np.array(heads, np.int64),
        "begin": np.zeros(1, np.int64),
        "axis": np.array([2], np.int64),
        "scale": np.array(scale, np.float32),
    }
    graph.initializer.extend(
        numpy_helper.from_array(value, prefix + name) for name, value in numbers.items()
    )

    def node(kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        graph.node.append(helper.make_node(kind, inputs, [prefix + output], **attributes))
        return prefix + output

    queries = node("Gather", [query, f"{prefix}heads"], "queries", axis=1)
    keys = node("Gather", [key, f"{prefix}heads"], "all_keys", axis=1)
    ends = [f"{prefix}begin", SOURCE_LENGTHS, f"{prefix}axis"]
    keys = node("Slice", [keys, *ends], "keys")
    turned = node("Transpose", [keys], "turned", perm=[0, 1, 3, 2])
    scores = node("MatMul", [queries, turned], "products")
    scores = node("Mul", [scores, f"{prefix}scale"], "scores")
    return node("Softmax", [scores], "weights", axis=-1)
