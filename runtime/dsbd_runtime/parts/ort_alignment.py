"""Alignment on ONNX Runtime: how the heads that follow the sound attend to it, token by token.

The graph is the decoder's without its caches behind it: one call has all tokens of a text, as if
nothing had been decoded before.

| output | shape, type | meaning |
|---|---|---|
| alignment_weights | [A,S,N] float32 | what each alignment head weighs the positions of the sound |
| logits | [R,V] float32 | as the decoder's |

Its inputs are those of the decoder: ``past_key_values`` are zeros of as many rows as there are
tokens, and the source is one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Source
from dsbd_runtime.bundle_files.manifest import ModelEntry
from dsbd_runtime.engine.graph import (
    INPUT_IDS,
    LOGIT_ROWS,
    LOGITS,
    POSITION_IDS,
    WRITE_INDICES,
    TensorSpec,
    full_output,
)
from dsbd_runtime.engine.graph_check import check_graph
from dsbd_runtime.engine.session import AlignedTokens
from dsbd_runtime.errors import CapacityError, EngineError
from dsbd_runtime.ort.ort_module import releasing_options
from dsbd_runtime.parts.cache_entries import parts_of, past_name
from dsbd_runtime.parts.cross_slots import CrossSlots, places_of_rows
from dsbd_runtime.parts.encoder_entry import SOURCE_LENGTHS, SOURCE_PLACES, SOURCE_ROWS
from dsbd_runtime.parts.kv_cache import NUMPY_DTYPES
from dsbd_runtime.parts.speech_entry import ALIGNMENT_WEIGHTS

_FLOATS = "tensor(float)"
_NO_MEMORY = ("Failed to allocate memory", "bad allocation", "bad_alloc")


@dataclass(frozen=True, kw_only=True)
class AlignmentContract:
    """The inputs and outputs of the graph of an engine's alignment."""

    entry: ModelEntry

    @property
    def inputs(self) -> dict[str, TensorSpec]:
        """The inputs by name: those of the decoder without a head."""
        head = (full_output(self.entry.vocab_size),)
        return dataclasses.replace(self.entry.contract, head=head).inputs

    @property
    def outputs(self) -> dict[str, TensorSpec]:
        """The outputs by name."""
        encoder = self.entry.encoder
        heads = (
            None if encoder is None or encoder.speech is None else encoder.speech.alignment_heads
        )
        return {
            ALIGNMENT_WEIGHTS: TensorSpec(_FLOATS, (len(heads or ()), None, None)),
            LOGITS: TensorSpec(_FLOATS, (None, self.entry.vocab_size)),
        }


class OrtAligner:
    """The alignment graph of one engine, opened when it is first needed."""

    def __init__(
        self,
        ort: ModuleType,
        path: Path,
        entry: ModelEntry,
        sources: CrossSlots,
        open_engine: Callable[[Path], Any],
    ) -> None:
        """Take the sources that the engine has read; nothing is opened yet."""
        self._ort = ort
        self._path = path
        self._entry = entry
        self._sources = sources
        self._open_engine = open_engine
        self._engine: Any = None

    def align(
        self, source: Source, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> AlignedTokens:
        """See Aligner."""
        read = np.array([*prompt_ids, *token_ids[:-1]], np.int64)
        if len(read) > self._entry.context_length:
            raise CapacityError(
                f"a text of {len(read)} tokens is to be aligned, the model reads "
                f"{self._entry.context_length}; shorten the prompt"
            )
        engine, found = self._opened(), self._sources.alone(source)
        rows, places = places_of_rows(np.zeros(len(read), np.int64), 1)
        first = len(prompt_ids) - 1  # whose logits are of the first new token
        arrays: dict[str, NDArray[Any]] = {
            INPUT_IDS: read[None],
            POSITION_IDS: np.arange(len(read))[None],
            WRITE_INDICES: np.zeros(1, np.int64),
            LOGIT_ROWS: np.arange(first, len(read)),
            SOURCE_ROWS: rows,
            SOURCE_PLACES: places,
            SOURCE_LENGTHS: found.lengths,
            **dict.fromkeys(self._entry.masks, np.tri(len(read), dtype=np.bool_)[None, None]),
            **self._no_rows(len(read)),
        }
        value_of = self._ort.OrtValue.ortvalue_from_numpy
        inputs = {name: value_of(array) for name, array in arrays.items()}
        weights, logits = self._run(engine, {**inputs, **found.values}, len(read))
        return AlignedTokens(weights[:, len(prompt_ids) :], logits)

    def close(self) -> None:
        """Release the engine; it would be opened again."""
        self._engine = None

    def _opened(self) -> Any:
        """Return the engine; a contradiction to its entry is a BundleError."""
        if self._engine is None:
            engine, contract = self._open_engine(self._path), AlignmentContract(entry=self._entry)
            check_graph(self._path, contract, engine.get_inputs(), engine.get_outputs())
            self._engine = engine
        return self._engine

    def _no_rows(self, number: int) -> dict[str, NDArray[Any]]:
        """Return caches of so many rows, which the call writes."""
        return {
            past_name(cache.layer, part): np.zeros(
                cache.shape(part, number), NUMPY_DTYPES[cache.dtype]
            )
            for cache, part in parts_of(self._entry.caches)
        }

    def _run(
        self, engine: Any, inputs: dict[str, Any], num_tokens: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        options = releasing_options(self._ort)  # the scores of all heads are seldom needed
        try:
            weights, logits = engine.run_with_ort_values(
                [ALIGNMENT_WEIGHTS, LOGITS], inputs, options
            )
        except Exception as error:  # ONNX Runtime's exceptions share no base but this one
            reason = " ".join(str(error).split())
            if any(sign in reason for sign in _NO_MEMORY):
                raise CapacityError(
                    f"no memory to align {num_tokens} tokens by {self._path}: {reason}; leave "
                    "times of words out, or run fewer requests"
                ) from error
            raise EngineError(
                f"ONNX Runtime failed in a call of {self._path} ({num_tokens} tokens): {reason}; "
                "copy the bundle or export again"
            ) from error
        return weights.numpy(), logits.numpy()
