"""Given rows: nodes of a prompt whose embeddings come from an encoder, not from their tokens.

| tensor | shape, type | meaning |
|---|---|---|
| given_rows | [E] int64 | increasing: which of the S nodes are given; E is 0 in most calls |
| given_embeddings | [E,(1+K)W] float32 | their embeddings as the first layer reads them, then K |
| | | times W numbers that are added to the outputs of the first K layers |
| position_ids | [A,S] int64 | positions on A axes, instead of one |
| the medium's | | inputs of encoder.onnx: one piece, see ``given_medium`` |
| given_embeddings | [E,(1+K)W] float32 | output of encoder.onnx: the rows of the piece |

A forward whose source is a ``GivenPrompt`` has given rows at the places of this prompt. A forward
without a source has only text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from dsbd_errors import DsbdError
from dsbd_forward.forward import Source
from dsbd_forward.rows import NO_INTS, Ints
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.attention.attention_rows import POSITION_IDS
from dsbd_runtime.parts.given.given_encoder import GIVEN_EMBEDDINGS, GivenEncoder
from dsbd_runtime.parts.given.given_medium import MediumEntry
from dsbd_runtime.parts.given.given_prompt import GivenPrompt
from dsbd_runtime.parts.host_binder import HostBinder
from dsbd_runtime.parts.part import (
    FLOAT32,
    INT64,
    Call,
    GraphContract,
    HostPlace,
    Part,
    PartEntry,
    Tensors,
    TensorSpec,
)
from dsbd_runtime.parts.source.encoder_entry import ENCODER_FILE
from dsbd_runtime.typed_json import check_counts, mismatch

GIVEN_ROWS = "given_rows"
_MOST_AXES = 3


@dataclass(frozen=True, kw_only=True)
class GivenEntry:
    """Manifest entry of the given rows of an engine.

    Attributes:
        placeholder_token_id: the token of a prompt at the place of a given row.
        width: W, the width of an embedding.
        levels: K, the number of first layers to whose outputs given rows are added.
        position_axes: A, how many numbers a position has: 3 (time, height, width) or 1.
        medium: what the encoder reads.
        fingerprint: sha256 (hex) of the encoder's config and weights; shows that a draft shares
            the encoder. None if it is not known.
        is_shared: for a draft, whether it uses the rows of the target's encoder. Then it has no
            encoder graph.
    """

    placeholder_token_id: int
    width: int
    levels: int
    position_axes: int
    medium: MediumEntry
    fingerprint: str | None = None
    is_shared: bool | None = None

    @property
    def row_width(self) -> int:
        return (1 + self.levels) * self.width

    def check(self, vocab_size: int, num_layers: int, where: str) -> None:
        """Raise BundleError unless the values are consistent with those of the engine."""
        check_counts({"width": self.width}, where)
        check_counts({"position_axes": self.position_axes}, where, _MOST_AXES)
        if not 0 <= self.levels < num_layers:
            raise mismatch(f"0 to {num_layers - 1}", self.levels, f"{where}: levels")
        if not 0 <= self.placeholder_token_id < vocab_size:
            expected = f"0 to {vocab_size - 1}"
            raise mismatch(expected, self.placeholder_token_id, f"{where}: placeholder_token_id")
        self.medium.check(f"{where}: medium")


def check_shared_rows(target: GivenEntry | None, draft: GivenEntry | None, where: str) -> None:
    """Raise BundleError unless a draft that shares the target's encoder reads its rows."""
    if target is not None and target.is_shared:
        raise mismatch("null: it is a draft's", True, f"{where}: target: given: is_shared")
    if draft is None or not draft.is_shared:
        return
    if target is None or target.row_width != draft.row_width:
        width = "null" if target is None else target.row_width
        expected = f"{width}, that of the target, whose encoder it shares"
        raise mismatch(expected, draft.row_width, f"{where}: draft: given: width")


@dataclass(frozen=True, kw_only=True)
class GivenRowsEntry(PartEntry):
    """The given rows in the manifest."""

    given: GivenEntry

    lacks: ClassVar[str] = "reads no prompts with sound or pictures"

    @property
    def files(self) -> tuple[str, ...]:
        return () if self.given.is_shared else (ENCODER_FILE,)

    @property
    def spec(self) -> Mapping[str, Any]:
        return {"joins_sources": True}

    def contract(self) -> GraphContract:
        given, axes = self.given, self.given.position_axes
        inputs = {GIVEN_ROWS: TensorSpec(INT64, ("E",)), **embeddings_of(given)}
        if axes > 1:
            inputs[POSITION_IDS] = TensorSpec(INT64, (axes, "S"))
        return GraphContract(inputs=inputs, outputs={})

    def on_host(self, place: HostPlace) -> GivenRows:
        path, graphs, given = place.folder / ENCODER_FILE, place.graphs, self.given
        if given.is_shared:
            target = place.of_target(type(self))
            assert isinstance(target, GivenRows)  # checked when the bundle was opened
            return SharedGivenRows(given, target.encoder)
        medium = given.medium
        outputs = embeddings_of(given) | medium.encoder_outputs
        contract = GraphContract(inputs=medium.encoder_inputs, outputs=outputs)
        return GivenRows(given, GivenEncoder(graphs.ort, path, contract, graphs.open(path)))


def embeddings_of(given: GivenEntry) -> Tensors:
    """Return the tensor of given rows: an output of the encoder, an input of the engine."""
    return {GIVEN_EMBEDDINGS: TensorSpec(FLOAT32, ("E", given.row_width))}


class GivenRows(Part):
    """The given rows of an engine's calls; ``encoder`` computes and keeps them."""

    grows_in_calls = True

    def __init__(self, entry: GivenEntry, encoder: GivenEncoder) -> None:
        self.encoder = encoder
        self._entry = entry
        self._none = np.zeros((0, entry.row_width), np.float32)
        self._fitting: WeakSet[GivenPrompt] = WeakSet()  # prompts whose pieces were checked

    @property
    def num_bytes(self) -> int:
        return self.encoder.num_bytes

    def read(self, source: Source) -> None:
        """See SourceReader: check a source. The calls with its rows compute them."""
        if source is None:
            return
        prompt = self._checked(source)
        if source not in self._fitting:
            for piece in prompt.pieces:
                self.encoder.check(piece)
            self._fitting.add(prompt)
        for piece in prompt.pieces:
            self.encoder.recall(piece)

    def release(self, source: Source) -> None:
        """See SourceReader: does nothing. Which rows are kept depends only on their last use."""

    def bind(self, call: Call, binder: HostBinder) -> None:
        """See Part; the encoder reads pieces with rows in this call unless their rows are kept.

        Raises as ``GivenEncoder.rows``; with several prompts the error of one is returned.
        """
        forward, num_axes = call.forward, self._entry.position_axes
        of_rows = forward.row_sources
        prompts = [None if each is None else self._checked(each) for each in of_rows.distinct]
        ends = np.array([0 if prompt is None else prompt.end for prompt in prompts])
        nodes, rows = NO_INTS, self._none
        if (forward.positions < ends[of_rows.index]).any():  # not usually: nodes after prompts
            nodes, rows = self._given(call, prompts)
        arrays: dict[str, NDArray[Any]] = {GIVEN_ROWS: nodes, GIVEN_EMBEDDINGS: rows}
        if num_axes > 1:
            axes = arrays[POSITION_IDS] = np.tile(forward.positions, (num_axes, 1))
            for number, prompt in enumerate(prompts):
                of_prompt = (of_rows.index == number).nonzero()[0]
                if prompt is not None:
                    axes[:, of_prompt] = prompt.on_axes(forward.positions[of_prompt], num_axes)
        binder.write(arrays)
        if (reading := self.encoder.take_reading()) is not None:
            call.returned["reading"] = reading

    def reserve(self, num_rows: int, num_used: int) -> None:
        if num_rows == 0:
            self.encoder.forget()

    def close(self) -> None:
        self.encoder.close()

    def _checked(self, source: Source) -> GivenPrompt:
        axes = self._entry.position_axes
        if not isinstance(source, GivenPrompt) or source.num_axes not in (1, axes):
            raise InputError(
                f"the source of a forward is {source!r}, expected a GivenPrompt with positions on "
                f"{axes} axes, or None for a prompt of text alone"
            )
        return source

    def _given(
        self, call: Call, prompts: Sequence[GivenPrompt | None]
    ) -> tuple[Ints, NDArray[np.float32]]:
        """Return which nodes are given, (E,) increasing, and their rows, (E, (1 + K) W)."""
        forward = call.forward
        index, nodes, rows = forward.row_sources.index, [NO_INTS], [self._none]
        for number, prompt in enumerate(prompts):
            if prompt is None:
                continue
            of_prompt = (index == number).nonzero()[0]
            given, pieces, places = prompt.given_among(forward.positions[of_prompt])
            try:
                for piece in np.unique(pieces).tolist():
                    is_of_piece = pieces == piece
                    rows.append(self.encoder.rows(prompt.pieces[piece])[places[is_of_piece]])
                    nodes.append(of_prompt[given[is_of_piece]])
            except DsbdError as error:
                if call.whole.sources is None:
                    raise
                call.returned.setdefault("failed", {})[prompt] = error
        joined = np.concatenate(nodes)
        self._check_tokens(forward.token_ids[joined])
        order = joined.argsort(kind="stable")
        return joined[order], np.concatenate(rows)[order]

    def _check_tokens(self, token_ids: Ints) -> None:
        """Raise InputError unless nodes, (E,), have the placeholder as their token."""
        placeholder = self._entry.placeholder_token_id
        if (other := token_ids[token_ids != placeholder]).size:
            raise InputError(
                f"the prompt has the token {int(other[0])} at the place of a given row, expected "
                f"the placeholder {placeholder}: the source is that of another prompt"
            )


class SharedGivenRows(GivenRows):
    """The given rows of a draft. The target's encoder computes and keeps them."""

    @property
    def num_bytes(self) -> int:
        return 0

    def reserve(self, num_rows: int, num_used: int) -> None:
        """See Part; does nothing: the target drops the rows."""

    def close(self) -> None:
        """See Part; does nothing: the target closes the encoder."""
