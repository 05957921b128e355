"""Sources: cross rows from an encoder, which the decoder's rows read.

If model.onnx.data has the same bytes as a weight of the encoder, the encoder's graph reads the
weight from there.
"""

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from dsbd_export.capture.caches import LayerCache
from dsbd_export.capture.forest_graph import (
    NODES,
    Axis,
    CapturedCall,
    Example,
    ExportContract,
    ExportPart,
    Hook,
    Made,
    kept_rows,
)
from dsbd_export.capture.source_attention import (
    DistanceBiases,
    SourcePlaces,
    forest_positions,
    rows_of_sources,
)
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.model_loading import cache_name
from dsbd_export.drawn_media import drawn_features, drawn_pictures
from dsbd_export.parts.rows import EVERY_ROW
from dsbd_runtime.bundle_files.bundle import (
    ENCODER_FILE,
    ENCODER_WEIGHTS_FILE,
    MODEL_FILE,
    WEIGHTS_FILE,
)
from dsbd_runtime.parts.attention.attention_rows import ROW_POSITIONS
from dsbd_runtime.parts.source.encoder_entry import (
    SOURCE_LENGTHS,
    SOURCE_PLACES,
    SOURCE_ROWS,
    EncoderEntry,
    cross_name,
)
from dsbd_runtime.parts.source.source_values import SourceValues
from dsbd_runtime.parts.source.speech_entry import SoundFeatures

_SOURCES = Axis("B", 2)


class FixedCrossRows(Cache):  # type: ignore[misc]  # transformers has no types
    """Cross rows that are computed already: layers read them and never write."""

    def __init__(self, rows: Sequence[LayerCache]) -> None:
        """Take key and value of each layer, (B, H, N, D)."""
        super().__init__(layers=[])
        self.layers = [SimpleNamespace(keys=keys, values=values) for keys, values in rows]

    def __len__(self) -> int:
        return len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return a number above 0, which means that the rows exist."""
        return 1


class ExportedSources(ExportPart):
    """Sources of a decoder's call: their cross rows, and which source each row reads."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._encoder = entry_of(checkpoint)

    def contract(self) -> ExportContract:
        inputs: dict[str, Example] = {}
        for entry in self._encoder.cross:
            inputs |= kept_rows(entry, cross_name, Axis("N", 11), _SOURCES)
        inputs |= {
            SOURCE_ROWS: Example((_SOURCES, Axis("P", 4))),
            SOURCE_PLACES: Example((NODES,)),
            SOURCE_LENGTHS: Example((_SOURCES,)),
        }
        if self._encoder.reads_positions:
            inputs[ROW_POSITIONS] = Example((EVERY_ROW.rows,))
        reason = "it reads a source, over whose rows sums are not exact"
        return ExportContract(inputs=inputs, entry={"encoder": self._encoder}, inexact=reason)

    def hook(self, model: Any, graph: Any) -> Hook:
        biases = DistanceBiases(model.get_decoder())

        @contextlib.contextmanager
        def reading(call: CapturedCall) -> Iterator[None]:
            given, inputs = call.arguments, call.inputs
            token_ids, positions = given.pop("input_ids"), given.pop("position_ids")[0]
            width = model.get_encoder().config.hidden_size
            unread = torch.zeros(1, 1, width, dtype=model.dtype)
            cross = [
                tuple(inputs[cross_name(entry.layer, part)] for part in entry.parts)
                for entry in self._encoder.cross
            ]
            cache = EncoderDecoderCache(call.cache, FixedCrossRows(cross))
            logit_rows = given.pop("logits_to_keep")
            given |= {
                "encoder_outputs": BaseModelOutput(last_hidden_state=unread),
                "decoder_input_ids": token_ids,
                "decoder_attention_mask": given.pop("attention_mask"),
                cache_name(model): cache,
            }
            names = (SOURCE_ROWS, SOURCE_PLACES, SOURCE_LENGTHS)
            places = SourcePlaces(*(inputs[name] for name in names))
            with contextlib.ExitStack() as stack:
                given |= stack.enter_context(forest_positions(model, token_ids[0], positions))
                stack.enter_context(rows_of_sources(places))
                if self._encoder.reads_positions:
                    stack.enter_context(biases.between(positions, inputs[ROW_POSITIONS]))
                stack.enter_context(_only_rows(model, logit_rows))
                yield

        return reading

    def write(self, made: Made) -> None:
        if num_bytes := share_weights(made.folder):
            made.report(
                f"{self._checkpoint.role}: {num_bytes:,} bytes of weights of both graphs are "
                "stored once"
            )


def entry_of(checkpoint: Checkpoint) -> EncoderEntry:
    """Return the encoder's entry of an encoder-decoder."""
    assert checkpoint.encoder is not None  # the caller has checked
    return checkpoint.encoder


@contextlib.contextmanager
def _only_rows(model: PreTrainedModel, rows: Tensor) -> Iterator[None]:
    """Make a model's head read only ``rows``: encoder-decoders have no ``logits_to_keep``."""
    head: Any = model.get_output_embeddings()
    original = head.forward
    head.forward = lambda hidden: original(hidden[:, rows])
    try:
        yield
    finally:
        del head.forward


def fixed_sources(encoder: EncoderEntry) -> list[SourceValues]:
    """Return sounds or pictures, all of the encoder's fixed shape, for the parity gate."""
    if (picture := encoder.picture) is not None:
        size = picture.height, picture.width
        return [picture.source_of(each) for each in drawn_pictures(size, size, size).values()]
    assert encoder.speech is not None  # it reads pictures or sound
    num_mels, num_frames = encoder.speech.shape
    drawn = drawn_features(num_mels, num_frames, num_frames, num_frames)
    return [SoundFeatures(features) for features in drawn.values()]


_ALIGNED_FROM, _ALIGNMENT = (
    2**20,
    2**16,
)  # bytes; large weights are aligned as in other graphs, so that they can be mapped


def share_weights(folder: Path) -> int:
    """Remove weights from the encoder's file that the decoder also has; return the bytes saved."""
    if not ((folder / WEIGHTS_FILE).is_file() and (folder / ENCODER_WEIGHTS_FILE).is_file()):
        return 0  # the weights are so few that they are in the graphs
    decoder = onnx.load(folder / MODEL_FILE, load_external_data=False)
    encoder = onnx.load(folder / ENCODER_FILE, load_external_data=False)
    decoder_bytes, encoder_bytes = (
        np.memmap(folder / n, np.uint8, "r") for n in (WEIGHTS_FILE, ENCODER_WEIGHTS_FILE)
    )
    decoder_weights = defaultdict(list)
    for weight in _stored(decoder, WEIGHTS_FILE):
        decoder_weights[weight.data_type, tuple(weight.dims)].append(weight)
    num_saved, kept = 0, []
    for weight in _stored(encoder, ENCODER_WEIGHTS_FILE):
        numbers = _bytes_of(weight, encoder_bytes)
        alike = decoder_weights[weight.data_type, tuple(weight.dims)]
        same = next(
            (w for w in alike if np.array_equal(_bytes_of(w, decoder_bytes), numbers)), None
        )
        if same is None:
            kept.append((weight, numbers))
            continue
        num_saved += len(numbers)
        _place(weight, WEIGHTS_FILE, *_place_of(same))
    if not num_saved:
        return 0
    _write(folder, kept)
    onnx.save(encoder, folder / ENCODER_FILE)
    return num_saved


def _write(folder: Path, weights: Iterable[tuple[TensorProto, NDArray[np.uint8]]]) -> None:
    """Write weights one after the other in place of the encoder's file."""
    partial = folder / f"{ENCODER_WEIGHTS_FILE}.partial"
    with partial.open("wb") as file:
        for weight, numbers in weights:
            if len(numbers) >= _ALIGNED_FROM:
                file.write(bytes(-file.tell() % _ALIGNMENT))
            _place(weight, ENCODER_WEIGHTS_FILE, file.tell(), len(numbers))
            numbers.tofile(file)
    os.replace(partial, folder / ENCODER_WEIGHTS_FILE)


def _stored(model: onnx.ModelProto, file: str) -> list[TensorProto]:
    """Return the weights of a graph that are in a file next to it."""
    return [
        weight
        for weight in model.graph.initializer
        if weight.data_location == TensorProto.EXTERNAL
        and any(e.key == "location" and e.value == file for e in weight.external_data)
    ]


def _place_of(weight: TensorProto) -> tuple[int, int]:
    entries = {entry.key: entry.value for entry in weight.external_data}
    return int(entries.get("offset", 0)), int(entries["length"])


def _bytes_of(weight: TensorProto, file: NDArray[np.uint8]) -> NDArray[np.uint8]:
    offset, length = _place_of(weight)
    return file[offset : offset + length]


def _place(weight: TensorProto, location: str, offset: int, length: int) -> None:
    del weight.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        weight.external_data.add(key=key, value=str(value))
