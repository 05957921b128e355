"""Alignment on ONNX Runtime: how the heads that follow the sound attend to it, token by token.

The graph is the decoder's, but returns no caches. One call reads all tokens of a text, as if
nothing had been decoded before.

| output | shape, type | meaning |
|---|---|---|
| alignment_weights | [A,S,N] float32 | weight of each position of the sound, by alignment head |
| logits | [R,V] float32 | as the decoder's |

It has the decoder's inputs. ``past_key_values`` are zeros, with one row for each token, and there
is one source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Source
from dsbd_runtime.errors import CapacityError
from dsbd_runtime.parts.attention.attention_rows import (
    INPUT_IDS,
    POSITION_IDS,
    WRITE_INDICES,
    AttentionEntry,
    places_of_rows,
)
from dsbd_runtime.parts.attention.cache_entries import parts_of, past_name
from dsbd_runtime.parts.attention.kv_cache import NUMPY_DTYPES
from dsbd_runtime.parts.graph_check import call_error, check_graph
from dsbd_runtime.parts.head.head import LOGIT_ROWS, LOGITS, HeadEntry
from dsbd_runtime.parts.part import (
    FLOAT32,
    GraphContract,
    HostPlace,
    Part,
    PartEntry,
    TensorSpec,
    part_of,
)
from dsbd_runtime.parts.source.encoder_entry import SOURCE_LENGTHS, SOURCE_PLACES, SOURCE_ROWS
from dsbd_runtime.parts.source.sources import Sources, SourcesEntry
from dsbd_runtime.parts.source.speech_entry import ALIGNMENT_FILE, ALIGNMENT_WEIGHTS


@dataclass(frozen=True)
class AlignedTokens:
    """How a speech model attends to the sound as it reads a text, and its predictions.

    weights: (A, n - 1, N) float32. The weight that each of the A alignment heads gives to each of
        the N positions of the sound, for the n new tokens except the last.
    logits: (n, V) float32. The logits that predict each new token after the tokens before it.
    """

    weights: NDArray[np.float32]
    logits: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class AlignmentGraphEntry(PartEntry):
    """Manifest entry of the alignment graph, which has the engine's own inputs."""

    attention: AttentionEntry
    sources: SourcesEntry
    head: HeadEntry  # returns all logits
    num_heads: int  # A
    context_length: int  # the most tokens of a text

    lacks: ClassVar[str] = "aligns no sources"  # ``check_runnable`` refuses it before

    @property
    def files(self) -> tuple[str, ...]:
        return (ALIGNMENT_FILE,)

    def graph_contract(self) -> GraphContract:
        inputs = GraphContract.of([self.attention, self.sources, self.head]).inputs
        weights = TensorSpec(FLOAT32, (self.num_heads, None, None))
        outputs = {ALIGNMENT_WEIGHTS: weights, **self.head.contract().outputs}
        return GraphContract(inputs=inputs, outputs=outputs)

    def on_host(self, place: HostPlace) -> Alignment:
        return Alignment(self, place)


class Alignment(Part):
    """The alignment graph of one engine, opened when it is first needed."""

    missing = (
        "the engine has no alignment graph, which tells how it attends to a sound; export "
        "a speech model's bundle again, of a checkpoint that names alignment_heads"
    )

    def __init__(self, entry: AlignmentGraphEntry, place: HostPlace) -> None:
        self._entry = entry
        self._path = place.folder / ALIGNMENT_FILE
        self._graphs = place.graphs
        self._sources = part_of(place.opened, Sources)
        self._engine: Any = None

    def align(
        self, source: Source, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> AlignedTokens:
        """Return how the engine attends to a source when it reads new tokens after a prompt.

        The cache stays unchanged. CapacityError: no memory, or the text is too long. BundleError,
        EngineError: the graph cannot be opened, or fails.
        """
        read = np.array([*prompt_ids, *token_ids[:-1]], np.int64)
        if len(read) > self._entry.context_length:
            raise CapacityError(
                f"a text of {len(read)} tokens is to be aligned, the model reads "
                f"{self._entry.context_length}; shorten the prompt"
            )
        engine, held = self._opened(), self._sources.slots.alone(source)
        self._sources.encoder.take_reading()  # a repeated reading belongs to no forward
        rows, places = places_of_rows(np.zeros(len(read), np.int64), 1)
        first = len(prompt_ids) - 1  # its logits predict the first new token
        mask = np.tri(len(read), dtype=np.bool_)
        arrays: dict[str, NDArray[Any]] = {
            INPUT_IDS: read[None],
            POSITION_IDS: np.arange(len(read))[None],
            WRITE_INDICES: np.zeros(1, np.int64),
            LOGIT_ROWS: np.arange(first, len(read)),
            SOURCE_ROWS: rows,
            SOURCE_PLACES: places,
            SOURCE_LENGTHS: held.lengths,
            **dict.fromkeys(self._entry.attention.masks, mask[None, None]),
            **self._no_rows(len(read)),
        }
        value_of = self._graphs.ort.OrtValue.ortvalue_from_numpy
        inputs = {name: value_of(array) for name, array in arrays.items()}
        weights, logits = self._run(engine, {**inputs, **held.values}, len(read))
        return AlignedTokens(weights[:, len(prompt_ids) :], logits)

    def close(self) -> None:
        self._engine = None

    def _opened(self) -> Any:
        if self._engine is None:
            engine, contract = self._graphs.open_again(self._path), self._entry.graph_contract()
            check_graph(self._path, contract, engine)
            self._engine = engine
        return self._engine

    def _no_rows(self, number: int) -> dict[str, NDArray[Any]]:
        return {
            past_name(cache.layer, part): np.zeros(
                cache.shape(part, number), NUMPY_DTYPES[cache.dtype]
            )
            for cache, part in parts_of(self._entry.attention.caches)
        }

    def _run(
        self, engine: Any, inputs: dict[str, Any], num_tokens: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        options = self._graphs.releasing_options()  # the scores of all heads are seldom needed
        names = [ALIGNMENT_WEIGHTS, LOGITS]
        try:
            weights, logits = engine.run_with_ort_values(names, inputs, options)
        except Exception as error:  # ONNX Runtime's exceptions have no other common base
            remedy = "leave times of words out, or run fewer requests"
            raise call_error(self._path, f"{num_tokens} tokens", error, remedy) from error
        return weights.numpy(), logits.numpy()
