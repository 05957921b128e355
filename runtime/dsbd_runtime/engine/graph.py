"""Graph contract of the engines: tensor names, and the head's outputs.

S: forest nodes of one forward (parents before children), C: cache capacity in rows, R: rows whose
logits are requested, V: vocabulary, K: rows to keep; Hkv, Dk, Dv: heads of one layer's cache and
widths of its keys and values, W and A: channels and ancestors of a convolution, which the manifest
has for each layer. M: capacity of the recent rows, which convolutions and recurrences keep; B:
checkpoints that the new rows are behind.

| tensor | shape, type | meaning |
|---|---|---|
| input_ids, position_ids | [1,S] int64 | the nodes; siblings share a position |
| attention_mask | [1,1,S,C] bool | node s sees cache row c; nothing else masks |
| attention_mask_sliding | [1,1,S,C] bool | the same cut to the window, for sliding-window layers |
| write_indices | [1] int64 | first cache row of the S new rows |
| logit_rows | [R] int64 | which of the S nodes need logits |
| recent_write_indices | [1] int64 | with recent rows: first of the S new ones among them |
| ancestors | [S,A] int64 | with convolutions: recent rows of the last A nodes of the path to each |
| | | node, oldest first, itself not; -1 before the path begins |
| recent_mask | [1,1,S,M] bool | with recurrences: node s sees recent row m, which is of its path |
| | | and behind its checkpoint |
| checkpoint_rows | [B,L] int64 | which new rows are behind each checkpoint, filled up with any |
| row_places | [S] int64 | where each new row stands in checkpoint_rows, row after row |
| past_key_values.{i}.key | [1,Hkv,C,Dk] | the external cache of layer i that attends |
| past_key_values.{i}.value | [1,Hkv,C,Dv] | |
| past_key_values.{i}.convolution | [1,1,M,W] | that of layer i, a convolution over the path |
| past_key_values.{i}.recurrent_key | [1,Hk,M,Dk] | that of layer i with a recurrent state |
| past_key_values.{i}.recurrent_delta | [1,H,M,Dv] | |
| past_key_values.{i}.recurrent_decay | [1,H,M,2] | |
| state.{i} | [B,H,Dk,Dv] float32 | the states of the checkpoints; zeros where a path begins |
| state_decay.{i} | [B,H,2] float32 | the decays at them |
| present.{i}.* | as past | the same buffer, updated in place |
| logits | [R,V] float32 | |

The manifest names the head: "full" for all logits, "topk:64" for an engine with a top-k head, or
"gather". A top-k head returns, of each row, its K largest logits in decreasing order and the log of
the sum of exp(logit) over all V tokens, from which log-probabilities follow without a row of V
numbers: top_logits [R,K] float32, top_ids [R,K] int64 and logsumexp [R] float32. Where the manifest
says ``full_logits`` it also has the output logits, the tensor that the head reads: a host leaves it
with the engine and copies the rows that it needs.

A gather head returns the logits of tokens that the host names, as many of a row as it likes: the
inputs gather_rows and gather_ids, [N] int64 each, say of which of the R rows and of which token.
Its outputs are gathered_logits [N] float32 and logsumexp [R] float32; logits is always there too.
A log-probability is a logit less its row's logsumexp, however many of the row's logits are read.

Engines of a pair with a feature draft have more tensors, in the engine's float type; W is the width
of the target's features, Wd that of the draft's own:

| tensor | shape | meaning |
|---|---|---|
| feature_rows | [F] int64 | of the target: which of the S nodes have their features returned |
| features | [F,W] | of the target: its hidden states of these nodes |
| target_features | [F,W] | of the draft: features that the target has returned |
| own_features | [P,Wd] | of the draft: features that it has returned itself |
| feature_index | [S] int64 | of the draft: which of these, the target's first, is that of each |
| | | node's parent; -1: none, zeros |
| features | [S,Wd] | of the draft: its own of all nodes |

The engine of an encoder-decoder has a second graph, the encoder, and reads what it leaves: see
``encoder_entry``.

The prune graph takes src_rows [K] int64, write_indices [1] int64 and the caches; row
write_indices + k becomes the old row src_rows[k]. Recent rows move by src_recent_rows and
recent_write_indices.

The fold graph of an engine with recurrences takes folded_rows [T] int64, recent rows of a path in
its order, the recurrent caches, and of the checkpoint before them state.{i} [1,H,Dk,Dv] and
state_decay.{i} [1,H,2]. It returns folded_state.{i} and folded_state_decay.{i}, those of the last
row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward
from dsbd_forward.rows import Ints
from dsbd_runtime.parts.cache_entries import (
    CacheEntry,
    num_ancestors,
    parts_of,
    past_name,
    present_name,
    recent,
    recurrent,
)
from dsbd_runtime.parts.encoder_entry import (
    HIDDEN_STATES,
    INPUT_FEATURES,
    ROW_POSITIONS,
    SOURCE_IDS,
    SOURCE_LENGTHS,
    SOURCE_PLACES,
    SOURCE_ROWS,
    EncoderEntry,
)

INPUT_IDS = "input_ids"
POSITION_IDS = "position_ids"
ATTENTION_MASK = "attention_mask"
ATTENTION_MASK_SLIDING = "attention_mask_sliding"
ANCESTORS = "ancestors"
RECENT_WRITE_INDICES = "recent_write_indices"
RECENT_MASK = "recent_mask"
CHECKPOINT_ROWS = "checkpoint_rows"
ROW_PLACES = "row_places"
WRITE_INDICES = "write_indices"
LOGIT_ROWS = "logit_rows"
LOGITS = "logits"
TOP_LOGITS = "top_logits"
TOP_IDS = "top_ids"
LOGSUMEXP = "logsumexp"
GATHER_ROWS = "gather_rows"
GATHER_IDS = "gather_ids"
GATHERED_LOGITS = "gathered_logits"
FEATURE_ROWS = "feature_rows"
FEATURES = "features"
TARGET_FEATURES = "target_features"
OWN_FEATURES = "own_features"
FEATURE_INDEX = "feature_index"
SRC_ROWS = "src_rows"
SRC_RECENT_ROWS = "src_recent_rows"
FOLDED_ROWS = "folded_rows"

ROW_INPUTS: dict[str, Callable[[Forward], Ints]] = {
    INPUT_IDS: attrgetter("token_ids"),
    POSITION_IDS: attrgetter("positions"),
}
"""The inputs [1,S] with an integer for each node: what a forward says of its rows beside masks."""

FULL = "full"
GATHER = "gather"
_TOP_PREFIX = "topk:"

_INT64, _BOOL, _FLOAT32 = "tensor(int64)", "tensor(bool)", "tensor(float)"
_HEAD_TYPES: dict[type[np.generic], str] = {np.float32: _FLOAT32, np.int64: _INT64}
_FLOAT_TYPES = {"fp32": _FLOAT32, "fp16": "tensor(float16)", "bf16": "tensor(bfloat16)"}


@dataclass(frozen=True, kw_only=True)
class FeatureEntry:
    """The features that an engine returns, and those that a feature draft reads.

    Attributes:
        width: of the target's.
        layers: of a target's engine, the transformer layers that its features enter, in the order
            in which they are concatenated; None in the entry of a draft.
        own_width: width of a feature draft's own features; None in the entry of a target.
    """

    width: int
    layers: list[int] | None = None
    own_width: int | None = None

    @property
    def returned_width(self) -> int:
        """Width of the features that the engine returns."""
        return self.width if self.own_width is None else self.own_width


@dataclass(frozen=True)
class HeadOutput:
    """One output of the head, of shape [R, *row_shape], or [N] if it is ``by_pair``."""

    name: str
    dtype: type[np.generic]
    row_shape: tuple[int, ...]
    by_pair: bool = False

    def shape(self, num_logit_rows: int, num_pairs: int) -> tuple[int, ...]:
        """Return its shape for R logit rows and N pairs."""
        return (num_pairs if self.by_pair else num_logit_rows, *self.row_shape)


def parse_num_top_logits(kind: str) -> int:
    """Return K of "topk:K", 0 of "full" and "gather"; raise ValueError for any other text."""
    if kind in (FULL, GATHER):
        return 0
    digits = kind.removeprefix(_TOP_PREFIX)
    if digits == kind or not (digits.isascii() and digits.isdigit()) or digits[0] == "0":
        raise ValueError(
            f"{kind!r} is neither {FULL!r} nor {_TOP_PREFIX}K with K at least 1, nor {GATHER!r}"
        )
    return int(digits)


def head_outputs(kind: str, vocab_size: int) -> tuple[HeadOutput, ...]:
    """Return the outputs that a forward copies from an engine that returns ``kind``."""
    num_top_logits = parse_num_top_logits(kind)
    if kind == GATHER:
        return (
            HeadOutput(GATHERED_LOGITS, np.float32, (), by_pair=True),
            HeadOutput(LOGSUMEXP, np.float32, ()),
        )
    if not num_top_logits:
        return (full_output(vocab_size),)
    return (
        HeadOutput(TOP_LOGITS, np.float32, (num_top_logits,)),
        HeadOutput(TOP_IDS, np.int64, (num_top_logits,)),
        HeadOutput(LOGSUMEXP, np.float32, ()),
    )


def full_output(vocab_size: int) -> HeadOutput:
    """Return the output of all logits."""
    return HeadOutput(LOGITS, np.float32, (vocab_size,))


def summed_outputs(vocab_size: int) -> tuple[HeadOutput, ...]:
    """Return what is read of an engine with a gather head without a gather."""
    return full_output(vocab_size), HeadOutput(LOGSUMEXP, np.float32, ())


def empty_outputs(
    head: tuple[HeadOutput, ...], num_logit_rows: int, num_pairs: int = 0
) -> dict[str, NDArray[Any]]:
    """Return uninitialised arrays for the outputs of R logit rows and N pairs, by name."""
    return {
        output.name: np.empty(output.shape(num_logit_rows, num_pairs), output.dtype)
        for output in head
    }


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of one tensor of the contract; None is a dynamic dimension."""

    type: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class GraphContract:
    """The inputs and outputs of one engine, as its manifest describes it.

    Attributes:
        caches: of the layers that have some.
        masks: names of the mask inputs.
        head: outputs besides the caches, those that stay with the engine included.
        features: those that it returns or reads, None without.
        dtype: of the features.
        encoder: whose cross rows it reads, None without.
    """

    caches: Sequence[CacheEntry]
    masks: Sequence[str]
    head: tuple[HeadOutput, ...]
    features: FeatureEntry | None = None
    dtype: str = "fp32"
    encoder: EncoderEntry | None = None

    @property
    def inputs(self) -> dict[str, TensorSpec]:
        """The inputs by name."""
        return {
            **dict.fromkeys(ROW_INPUTS, TensorSpec(_INT64, (1, None))),
            **{mask: TensorSpec(_BOOL, (1, 1, None, None)) for mask in self.masks},
            **self._path_inputs,
            WRITE_INDICES: TensorSpec(_INT64, (1,)),
            LOGIT_ROWS: TensorSpec(_INT64, (None,)),
            **{name: TensorSpec(_INT64, (None,)) for name in self._gather_inputs},
            **self._feature_inputs,
            **self._source_inputs,
            **self._caches(past_name),
        }

    @property
    def outputs(self) -> dict[str, TensorSpec]:
        """The outputs by name."""
        head = {
            output.name: TensorSpec(_HEAD_TYPES[output.dtype], (None, *output.row_shape))
            for output in self.head
        }
        if self.features is not None:
            shape = (None, self.features.returned_width)
            head[FEATURES] = TensorSpec(_FLOAT_TYPES[self.dtype], shape)
        return {**head, **self._caches(present_name)}

    @property
    def _path_inputs(self) -> dict[str, TensorSpec]:
        """The inputs of layers that keep recent rows, none without any."""
        inputs = {}
        if recent(self.caches):
            inputs[RECENT_WRITE_INDICES] = TensorSpec(_INT64, (1,))
        if number := num_ancestors(self.caches):
            inputs[ANCESTORS] = TensorSpec(_INT64, (None, number))
        if entries := recurrent(self.caches):
            inputs[RECENT_MASK] = TensorSpec(_BOOL, (1, 1, None, None))
            inputs[CHECKPOINT_ROWS] = TensorSpec(_INT64, (None, None))
            inputs[ROW_PLACES] = TensorSpec(_INT64, (None,))
            states = (state for entry in entries for state in entry.states.items())
            inputs |= {name: TensorSpec(_FLOAT32, (None, *shape)) for name, shape in states}
        return inputs

    @property
    def _feature_inputs(self) -> dict[str, TensorSpec]:
        if self.features is None:
            return {}
        if self.features.own_width is None:
            return {FEATURE_ROWS: TensorSpec(_INT64, (None,))}
        kind = _FLOAT_TYPES[self.dtype]
        return {
            TARGET_FEATURES: TensorSpec(kind, (None, self.features.width)),
            OWN_FEATURES: TensorSpec(kind, (None, self.features.own_width)),
            FEATURE_INDEX: TensorSpec(_INT64, (None,)),
        }

    @property
    def _source_inputs(self) -> dict[str, TensorSpec]:
        if self.encoder is None:
            return {}
        inputs = {
            SOURCE_ROWS: TensorSpec(_INT64, (None, None)),
            SOURCE_PLACES: TensorSpec(_INT64, (None,)),
            SOURCE_LENGTHS: TensorSpec(_INT64, (None,)),
        }
        if self.encoder.reads_positions:
            inputs[ROW_POSITIONS] = TensorSpec(_INT64, (None,))
        return {**inputs, **cross_specs(self.encoder, None)}

    @property
    def _gather_inputs(self) -> tuple[str, ...]:
        """The inputs of a gather head, none without one."""
        gathers = any(output.by_pair for output in self.head)
        return (GATHER_ROWS, GATHER_IDS) if gathers else ()

    def _caches(self, name_of: Callable[[int, str], str]) -> dict[str, TensorSpec]:
        return {
            name_of(cache.layer, part): TensorSpec(
                _FLOAT_TYPES[cache.dtype], (*shape[:2], None, shape[3])
            )
            for cache, part in parts_of(self.caches)
            for shape in (cache.shape(part, 0),)
        }


def cross_specs(
    encoder: EncoderEntry, num_sources: int | None, number: int | None = None
) -> dict[str, TensorSpec]:
    """Return the cross rows by name: outputs of an encoder's graph, inputs of its decoder's.

    num_sources: those of a call; None: any number. number: of the rows of each; None: any.
    """
    return {
        name: TensorSpec(_FLOAT_TYPES[dtype], (num_sources, num_heads, number, width))
        for name, (dtype, num_heads, width) in encoder.cross_shapes.items()
    }


@dataclass(frozen=True)
class EncoderContract:
    """The inputs and outputs of an encoder's graph."""

    encoder: EncoderEntry

    @property
    def inputs(self) -> dict[str, TensorSpec]:
        """The inputs by name."""
        if self.encoder.is_shared:
            return self._hidden
        if (speech := self.encoder.speech) is not None:
            shape = (1, speech.num_mels, speech.num_frames)
            return {INPUT_FEATURES: TensorSpec(_FLOAT32, shape)}
        return {SOURCE_IDS: TensorSpec(_INT64, (1, None))}

    @property
    def outputs(self) -> dict[str, TensorSpec]:
        """The outputs by name."""
        hidden = self._hidden if self.encoder.returns_hidden else {}
        return {**cross_specs(self.encoder, 1, self._num_positions), **hidden}

    @property
    def _num_positions(self) -> int | None:
        speech = self.encoder.speech
        return None if speech is None else speech.num_positions

    @property
    def _hidden(self) -> dict[str, TensorSpec]:
        kind = _FLOAT_TYPES[self.encoder.cross[0].dtype]
        shape = (1, self._num_positions, self.encoder.hidden_width)
        return {HIDDEN_STATES: TensorSpec(kind, shape)}
