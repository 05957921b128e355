"""Model source of a language model with given rows: graphs of its decoder and its encoder."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsbd_export.capture.caches import largest_values
from dsbd_export.capture.forest_graph import (
    NODES,
    Axis,
    CapturedCall,
    Example,
    ExportContract,
    ExportPart,
    Hook,
    Made,
)
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.model_loading import hash_weights, load_model, reference_dtype
from dsbd_export.config import ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity_engine import as_export_errors, parity_engine
from dsbd_export.given_prompt.checkpoint import GivenCheckpoint
from dsbd_export.given_prompt.encoders import embedded, weights_of_encoder
from dsbd_export.given_prompt.media import GivenCase, Medium, with_medium
from dsbd_export.model_source import EngineGraph, ModelSource
from dsbd_export.parity_cases import (
    PREFILL,
    TREE,
    ComputeIn,
    ForestCase,
    Reference,
    forest_cases,
    text_case,
)
from dsbd_export.progress import Report
from dsbd_runtime.parts.attention.attention_rows import POSITION_IDS
from dsbd_runtime.parts.given.given_encoder import GIVEN_EMBEDDINGS
from dsbd_runtime.parts.given.given_rows import GIVEN_ROWS, GivenRows
from dsbd_runtime.parts.part import BOOL, FLOAT32, INT64, Tensors

_LIMIT = 1e-4  # largest error relative to the largest number of the rows; tiny models have 5e-7
_ROWS = Axis("E", 2, min_size=0)
_DTYPES = {FLOAT32: torch.float32, INT64: torch.int64, BOOL: torch.bool}
_SIZES = {"B": 2, "E": 7, "N": 12, "Q": 3, "T": 3}
"""Lengths in captured examples, by names of dynamic axes in entries of media."""


class ExportedGivenRows(ExportPart):
    """Given rows of a call, which replace the embeddings of their tokens."""

    def __init__(self, checkpoint: GivenCheckpoint) -> None:
        self._checkpoint, self._given, self._kind = checkpoint, checkpoint.given, checkpoint.kind
        self._media = self._kind.media(self._given.medium)
        if self._given.is_shared:  # the target's rows were compared already
            self._media = []
        self._rows: list[NDArray[np.float32]] = []  # rows of each medium by the model's own encoder

    def contract(self) -> ExportContract:
        axes = self._given.position_axes
        rows = Example((_ROWS, self._given.row_width), torch.float32)
        inputs = {GIVEN_ROWS: Example((_ROWS,)), GIVEN_EMBEDDINGS: rows}
        if axes > 1:
            inputs[POSITION_IDS] = Example((axes, NODES))
        return ExportContract(inputs=inputs, entry={"given": self._given})

    def refer(self, model: Any, references: list[Reference]) -> list[Reference]:
        with torch.no_grad(), ComputeIn(torch.float32):
            rows_by_medium = [
                self._kind.own_rows(model, medium.arguments) for medium in self._media
            ]
        self._rows = [rows.numpy() for rows in rows_by_medium]
        return references

    def hook(self, model: Any, graph: Any) -> Hook:
        given = self._given

        @contextlib.contextmanager
        def reading(call: CapturedCall) -> Iterator[None]:
            rows, arguments = call.inputs[GIVEN_ROWS], call.arguments
            embeddings, *levels = torch.split(call.inputs[GIVEN_EMBEDDINGS], given.width, dim=1)
            token_ids = arguments.pop("input_ids")
            read_as = self._kind.read_as
            of_tokens = embedded(model, token_ids, given.placeholder_token_id, read_as)[0]
            # The model's own forward continues from here and applies its multipliers.
            arguments["inputs_embeds"] = of_tokens.index_put((rows,), embeddings)[None]
            if given.position_axes > 1:
                arguments["position_ids"] = arguments["position_ids"][:, None]  # (A, 1, S)
            with added_after(model.get_decoder().layers, rows, levels):
                yield

        return reading

    def complete(self, made: Made) -> dict[str, Any]:
        """See ExportPart; compares the encoder's rows with those of the model's own encoder."""
        role = self._checkpoint.role
        if not self._media:
            return {}
        made.report(f"{role}: comparing the rows of its encoder")
        worst = 0.0
        with parity_engine(made.judged, role) as engine:
            encoder = engine.model.part(GivenRows).encoder
            for medium, original in zip(self._media, self._rows, strict=True):
                with as_export_errors():
                    exported = np.concatenate([encoder.rows(piece) for piece in medium.pieces])
                if exported.shape != original.shape:
                    raise self._error(
                        f"{medium.name} has {len(exported)} rows, not {len(original)}"
                    )
                error = float(np.abs(exported - original).max() / np.abs(original).max())
                if made.options.is_exact and not error <= _LIMIT:  # also when it is NaN
                    raise self._error(
                        f"rows of {medium.name} differ by {error:.3g} of their largest number, the "
                        f"limit is {_LIMIT:g}"
                    )
                worst = max(worst, error)
        made.report(f"{role}: rows of its encoder differ by {worst:.2g} of their largest number")
        return {}

    def _error(self, reason: str) -> ExportError:
        checkpoint = self._checkpoint
        return ExportError(
            f"parity failed: the encoder of the {checkpoint.role} (family {checkpoint.family}) "
            f"differs from the checkpoint: {reason}; this model is not supported"
        )


@contextlib.contextmanager
def added_after(layers: Sequence[Any], rows: Tensor, levels: Sequence[Tensor]) -> Iterator[None]:
    """In the block, add given rows, (E, W) for each level, to the outputs of the first layers."""
    with contextlib.ExitStack() as hooks:
        for layer, level in zip(layers, levels, strict=False):

            def added(_module: Any, _inputs: Any, output: Any, level: Tensor = level) -> Any:
                if isinstance(output, tuple):
                    return (output[0].index_add(1, rows, level[None]), *output[1:])
                return output.index_add(1, rows, level[None])

            hooks.callback(layer.register_forward_hook(added).remove)
        yield


def _examples(inputs: Tensors) -> dict[str, Example]:
    return {
        name: Example(
            tuple(n if isinstance(n, int) else Axis(str(n), _SIZES[str(n)]) for n in spec.shape),
            _DTYPES[spec.type],
        )
        for name, spec in inputs.items()
    }


class GivenPromptSource(ModelSource):
    """A language model with given rows in its prompts."""

    _checkpoint: GivenCheckpoint

    def load(self, dtype: str, report: Report) -> Any:
        """See ModelSource; the whole model is loaded, no part is left out."""
        whole = self._checkpoint.composite
        assert whole is not None  # all kinds have configs of an encoder and of a text part
        as_one = replace(self._checkpoint, config=whole, composite=None)
        model = load_model(as_one, reference_dtype(as_one, dtype), report)
        self._checkpoint.kind.prepare(model, as_one)
        return model

    def probed(self, model: Any, dtype: str) -> Checkpoint:
        """See ModelSource; a draft shares the target's encoder if both have the same weights."""
        digest = hashlib.sha256()
        hash_weights(weights_of_encoder(model), digest)
        given, target = self._checkpoint.given, self._checkpoint.target_given
        if target is not None and target.fingerprint == digest.hexdigest():
            given = replace(given, is_shared=True)
        elif self._checkpoint.role == "target":
            given = replace(given, fingerprint=digest.hexdigest())
        self._checkpoint = replace(self._checkpoint, given=given)
        return super().probed(model, dtype)

    def parts(self, options: ModelOptions) -> list[ExportPart]:
        return [*super().parts(options), ExportedGivenRows(self._checkpoint)]

    def capture(self, model: Any, parts: Sequence[ExportPart], report: Report) -> list[EngineGraph]:
        graphs = super().capture(model, parts, report)
        if self._checkpoint.shares_encoder:
            return graphs
        medium = self._checkpoint.given.medium
        outputs = (GIVEN_EMBEDDINGS, *medium.encoder_outputs)
        contract = ExportContract(inputs=_examples(medium.encoder_inputs), outputs=outputs)
        module = self._checkpoint.kind.encoder(model)
        return [*graphs, self.capture_encoder(module, contract, report)]

    def largest_values(self, model: Any) -> dict[int, NDArray[np.float32]]:
        """See ModelSource; given rows may have larger values than any text."""
        return largest_values(model, self._checkpoint, self._given_cases()[-1:])

    def _cases(self) -> list[ForestCase]:
        checkpoint = self._checkpoint
        return [*forest_cases(checkpoint), *self._given_cases(), text_case(checkpoint)]

    def _given_cases(self) -> list[GivenCase]:
        """Return a tree after each medium that fits, and the longest such medium in a prefill."""
        checkpoint = self._checkpoint
        tree = [case for case in forest_cases(checkpoint) if case.name == TREE][1]
        prefill = [case for case in forest_cases(checkpoint) if case.name == PREFILL][1]
        room = checkpoint.context_length - tree.prompt_length - len(tree.node_ids)
        media = [each for each in self._media() if each.num_rows <= room]
        if not media:
            raise ExportError(
                f"a context of {checkpoint.context_length} tokens has no room for the shortest "
                f"sound or picture of the {checkpoint.role}; give a larger max_context"
            )
        placeholder = checkpoint.given.placeholder_token_id
        cases = [with_medium(tree, each, placeholder) for each in media]
        return [*cases, with_medium(prefill, media[-1], placeholder)]

    def _calibration_case(self, texts: Sequence[str]) -> ForestCase:
        case, media = super()._calibration_case(texts), self._media()
        return with_medium(case, media[-1], self._checkpoint.given.placeholder_token_id)

    def _media(self) -> list[Medium]:
        return self._checkpoint.kind.media(self._checkpoint.given.medium)
