"""Media of the parity gate: what a model's own forward reads, and the pieces of an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dsbd_export.parity_cases import ForestCase
from dsbd_forward.forward import Source
from dsbd_runtime.parts.given_prompt import GivenPiece, GivenPrompt


@dataclass(frozen=True, kw_only=True)
class Medium:
    """A sound or a picture."""

    name: str
    pieces: Sequence[GivenPiece]
    # arguments of the model's own forward in addition to tokens: those of several paths follow each
    # other on the first axis
    arguments: Mapping[str, Tensor]

    @property
    def num_rows(self) -> int:
        return sum(piece.num_rows for piece in self.pieces)


@dataclass(frozen=True, kw_only=True)
class GivenCase(ForestCase):
    """A comparison whose prompt has the rows of a medium."""

    given: GivenPrompt
    medium: Medium

    @property
    def source(self) -> Source:
        return self.given

    def arguments_of(self, num_paths: int) -> dict[str, Tensor]:
        return {
            name: values.repeat(num_paths, *[1] * (values.ndim - 1))
            for name, values in self.medium.arguments.items()
        }


_NUM_BEFORE = 5  # tokens of the prompt before the given rows


def with_medium(case: ForestCase, medium: Medium, placeholder_token_id: int) -> GivenCase:
    """Return a case with a medium in its prompt: in its prefix or, of a prefill, in its nodes."""
    other = 0 if placeholder_token_id else 1  # no other token may be taken for a given row
    prefix, nodes = (
        np.where(ids == placeholder_token_id, other, ids)
        for ids in (case.prefix_ids, case.node_ids)
    )
    prompt = prefix if len(prefix) else nodes
    first = min(_NUM_BEFORE, len(prompt) - 1)
    rows = np.full(medium.num_rows, placeholder_token_id)
    prompt = np.concatenate([prompt[:first], rows, prompt[first:]])
    given = GivenPrompt(first + np.arange(len(rows)), medium.pieces)
    fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(ForestCase)}
    if len(prefix):
        fields |= {"prefix_ids": prompt, "node_ids": nodes}
    else:
        num_nodes = len(prompt)
        is_later = case.rows >= first
        fields |= {
            "node_ids": prompt,
            "parents": np.arange(-1, num_nodes - 1),
            "rows": np.where(is_later, case.rows + len(rows), case.rows),
        }
    return GivenCase(**fields, given=given, medium=medium)
