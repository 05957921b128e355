"""Encoder of an encoder-decoder: its graph's names, its entry in the manifest, its source.

A source is a tuple of tokens, the features of a window of sound, or a picture. The encoder runs
once for each request. It returns the cross rows: for each decoder layer a key and a value of every
token of the source, of every two frames, or of every patch. All beams and drafted nodes read them
and none writes them.

A call of the decoder has the cross rows of B sources, padded to the longest. ``source_rows`` names
the source of each of its S rows: it lists, for each source, the P rows that read it.

| tensor | shape, type | meaning |
|---|---|---|
| source_ids | [1,N] int64 | encoder.onnx, input: the tokens of the source |
| input_features | [1,M,F] float32 | the input of a speech model instead: a window of sound |
| pixel_values | [1,3,H,W] float32 | the input of a model that reads pictures instead |
| cross.{i}.key, cross.{i}.value | [1,H,N,D] | encoder.onnx, outputs |
| hidden_states | [1,N,W] | encoder.onnx, last output, for a draft that shares the encoder. The |
| | | draft's encoder.onnx has it as the input instead of source_ids |
| cross.{i}.key, cross.{i}.value | [B,H,N,D] | decoder's graph: the cross rows of B sources |
| source_lengths | [B] int64 | decoder's graph: tokens of each source; any finite numbers follow |
| | | them in the cross rows |
| source_rows | [B,P] int64 | decoder's graph: the rows of the call that read each source, filled |
| | | up with any other rows |
| source_places | [S] int64 | decoder's graph: index of each row in source_rows, read one source |
| | | after the other |
"""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Source
from dsbd_forward.rows import Ints
from dsbd_runtime.errors import BundleError, CapacityError, InputError
from dsbd_runtime.parts.attention.cache_entries import AttentionRows, parts_of
from dsbd_runtime.parts.part import FLOAT32, FLOAT_TYPES, INT64, GraphContract, Tensors, TensorSpec
from dsbd_runtime.parts.source.picture_entry import PictureEntry
from dsbd_runtime.parts.source.source_values import FixedSource, checked_values
from dsbd_runtime.parts.source.speech_entry import SpeechEntry
from dsbd_runtime.typed_json import in_short, mismatch

ENCODER_FILE = "encoder.onnx"
ENCODER_WEIGHTS_FILE = f"{ENCODER_FILE}.data"
SOURCE_IDS = "source_ids"
HIDDEN_STATES = "hidden_states"
SOURCE_LENGTHS = "source_lengths"
SOURCE_ROWS = "source_rows"
SOURCE_PLACES = "source_places"
INPUT_FEATURES = SpeechEntry.input_name


def cross_name(layer: int, part: str) -> str:
    """Return the name of one of the ``parts`` of the cross rows that a decoder layer reads."""
    return f"cross.{layer}.{part}"


@dataclass(frozen=True, kw_only=True)
class EncoderEntry:
    """Manifest entry of the encoder of a decoder's engine.

    Attributes:
        vocab_size: vocabulary size of a source; if the source is no text, the decoder's.
        context_length: the most tokens of a source; for a speech model the frames of a window, for
            pictures the rows of one.
        start_token_id: the first token of every target text.
        cross: the cross rows of the decoder layers that read the source.
        reads_positions: whether the decoder's graph has the input ``row_positions``.
        languages: for a model that translates between several languages, the token of each by its
            name; None for any other model.
        unknown_token_id: the token that replaces a source's tokens beyond ``vocab_size``; None if
            the model has none.
        hidden_width: width of the hidden states that its graph returns. For a draft that shares the
            target's encoder: of those that its graph reads. None: it does neither.
        fingerprint: sha256 (hex) of everything that decides the hidden states; shows that a draft
            shares the encoder. None if the graph returns no hidden states.
        is_shared: for a draft, whether it shares the target's encoder. Then its graph reads the
            target's hidden states instead of a source.
        speech, picture: entry of a source that is sound, or a picture; None: it is a text.
    """

    vocab_size: int
    context_length: int
    start_token_id: int
    cross: list[AttentionRows]
    reads_positions: bool = False
    languages: dict[str, int] | None = None
    unknown_token_id: int | None = None
    hidden_width: int | None = None
    fingerprint: str | None = None
    is_shared: bool | None = None
    speech: SpeechEntry | None = None
    picture: PictureEntry | None = None

    @property
    def returns_hidden(self) -> bool:
        return self.hidden_width is not None and not self.is_shared

    @property
    def fixed(self) -> FixedSource | None:
        """The kind of its sources if all are arrays of one shape; None: the sources are texts."""
        return self.speech or self.picture

    @property
    def reads(self) -> object:
        """Settings of the sources that it reads, None if it reads a text; equal for a pair."""
        return self.picture if self.speech is None else self.speech.features

    @property
    def num_alignment_heads(self) -> int:
        """Heads of the alignment graph; 0 without one."""
        speech = self.speech
        if speech is None or speech.alignment is None:
            return 0
        return len(speech.alignment_heads or ())

    @property
    def cross_shapes(self) -> dict[str, tuple[str, int, int]]:
        """Float type, number of heads and width of every cross tensor, by its name, in order."""
        return {
            cross_name(rows.layer, part): (rows.dtype, *rows.parts[part])
            for rows, part in parts_of(self.cross)
        }


def cross_specs(encoder: EncoderEntry, num_sources: int | str, length: int | str) -> Tensors:
    """Return the cross rows by name: outputs of an encoder's graph, inputs of the decoder's graph.

    num_sources, length: number of sources and rows of each, or the names of these dimensions.
    """
    return {
        name: TensorSpec(FLOAT_TYPES[dtype], (num_sources, num_heads, length, width))
        for name, (dtype, num_heads, width) in encoder.cross_shapes.items()
    }


def encoder_contract(encoder: EncoderEntry) -> GraphContract:
    """Return the inputs and outputs of an encoder's graph."""
    fixed = encoder.fixed
    length: int | str = "E" if fixed is None else fixed.num_positions
    kind = FLOAT_TYPES[encoder.cross[0].dtype]
    hidden = {HIDDEN_STATES: TensorSpec(kind, (1, length, encoder.hidden_width))}
    if encoder.is_shared:
        inputs = hidden
    elif fixed is not None:
        inputs = {fixed.input_name: TensorSpec(FLOAT32, (1, *fixed.shape))}
    else:
        inputs = {SOURCE_IDS: TensorSpec(INT64, (1, None))}
    outputs = cross_specs(encoder, 1, length) | (hidden if encoder.returns_hidden else {})
    return GraphContract(inputs=inputs, outputs=outputs)


def check_shared_encoder(
    target: EncoderEntry | None, draft: EncoderEntry | None, where: str
) -> None:
    """Raise BundleError unless a draft that shares the target's encoder reads its outputs."""
    if target is not None and target.is_shared:
        raise mismatch("null: it is a draft's", True, f"{where}: target: encoder: is_shared")
    if draft is None or not draft.is_shared:
        return
    place = f"{where}: draft: encoder"
    if target is None or target.hidden_width is None:
        raise BundleError(
            f"{place} is shared with the target, whose encoder returns no hidden states; export "
            "target and draft again, both with dsbd-export --target --draft"
        )
    for field in ("hidden_width", "vocab_size", "context_length"):
        wanted, given = getattr(target, field), getattr(draft, field)
        if given != wanted:
            expected = f"{in_short(wanted)}, that of the target, whose encoder it shares"
            raise mismatch(expected, given, f"{place}: {field}")


def encoder_input(entry: EncoderEntry, source: Source) -> tuple[str, NDArray[Any]]:
    """Return an encoder's input name and array; InputError: no source; CapacityError: too long."""
    if (fixed := entry.fixed) is not None:
        return fixed.input_name, checked_values(fixed, source)[None]
    return SOURCE_IDS, _checked_ids(entry, source)[None]


def _checked_ids(entry: EncoderEntry, source: Source) -> Ints:
    if not isinstance(source, tuple) or not source:
        raise InputError(
            f"the source of a forward is {source!r}, but the engine is an encoder-decoder's: "
            "expected a tuple of token ids, at least one"
        )
    token_ids = cast("tuple[int, ...]", source)
    check_length(len(token_ids), entry.context_length)
    ids = np.array(token_ids)
    if ids.dtype != np.int64 or ids.min() < 0 or ids.max() >= entry.vocab_size:
        wrong = next(
            each
            for each in token_ids
            if not isinstance(each, int) or not 0 <= each < entry.vocab_size
        )
        raise InputError(
            f"the source has the token {wrong!r}, expected ids from 0 to {entry.vocab_size - 1}; "
            "encode it with the bundle's tokenizer"
        )
    return ids


def check_length(num_tokens: int, limit: int) -> None:
    """Raise CapacityError for a source of more tokens than an encoder reads."""
    if num_tokens > limit:
        raise CapacityError(
            f"the prompt is too long: this model's maximum context length is {limit} tokens of a "
            f"source, the source has {num_tokens}; split it, as by sentences"
        )
