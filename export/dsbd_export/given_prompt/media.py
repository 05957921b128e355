"""Media of the parity gate: inputs of the model's own forward, and pieces for an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsbd_export.parity_cases import ForestCase
from dsbd_forward.forward import Source
from dsbd_forward.rows import Ints
from dsbd_runtime.media.given_grid import mrope_positions
from dsbd_runtime.parts.given.given_prompt import GivenPiece, GivenPrompt

CALL_ROWS = 256
"""Maximum rows of a call of an engine; the longest medium has more."""


@dataclass(frozen=True, kw_only=True)
class Medium:
    """A sound or pictures."""

    name: str
    pieces: Sequence[GivenPiece]
    # arguments of the model's own forward for one prompt, in addition to tokens
    arguments: Mapping[str, Tensor]
    # (time, height, width) of each piece's rows, if positions have several axes
    grids: Sequence[tuple[int, int, int]] = ()
    num_between: int = 0  # tokens of text between two pieces

    @property
    def num_rows(self) -> int:
        return sum(piece.num_rows for piece in self.pieces)

    @property
    def places(self) -> Ints:
        """Places of the rows, (E,), in a prompt that begins with the medium."""
        sizes = [piece.num_rows for piece in self.pieces]
        later = np.repeat(np.arange(len(sizes)), sizes) * self.num_between
        return np.asarray(np.arange(sum(sizes)) + later)


def side_by_side(media: Sequence[Medium], axis: int) -> Medium:
    """Return several pictures as one medium for one prompt, with a token between two pictures.

    axis: axis of the arguments along which the model's own forward has several pictures.
    """
    arguments = [medium.arguments for medium in media]
    return Medium(
        name=" and ".join(medium.name for medium in media),
        pieces=[piece for medium in media for piece in medium.pieces],
        arguments={
            name: torch.cat([each[name] for each in arguments], dim=axis) for name in arguments[0]
        },
        grids=[grid for medium in media for grid in medium.grids],
        num_between=1,
    )


@dataclass(frozen=True, kw_only=True)
class GivenCase(ForestCase):
    """A parity case whose prompt contains the rows of a medium."""

    given: GivenPrompt
    medium: Medium
    places: Ints  # of the given rows, (E,)

    @property
    def source(self) -> Source:
        return self.given

    def arguments_of(self, paths: Tensor) -> dict[str, Tensor]:
        arguments = {
            name: values.repeat(len(paths), *[1] * (values.ndim - 1))
            for name, values in self.medium.arguments.items()
        }
        if self.medium.grids:  # the model computes positions from them
            is_picture = torch.zeros_like(paths, dtype=torch.int32)
            is_picture[:, torch.from_numpy(self.places)] = 1
            arguments["mm_token_type_ids"] = is_picture
        return arguments


_NUM_BEFORE = 5  # tokens of the prompt before the given rows


def with_medium(case: ForestCase, medium: Medium, placeholder_token_id: int) -> GivenCase:
    """Return a case with a medium in its prompt: in its prefix, or in the nodes of a prefill."""
    other = 0 if placeholder_token_id else 1  # no other token may look like a given row
    prefix, nodes = (
        np.where(ids == placeholder_token_id, other, ids)
        for ids in (case.prefix_ids, case.node_ids)
    )
    prompt = prefix if len(prefix) else nodes
    places = medium.places + min(_NUM_BEFORE, len(prompt) - 1)
    is_text = np.ones(len(prompt) + len(places), np.bool_)
    is_text[places] = False
    ids = np.full(len(is_text), placeholder_token_id)
    ids[is_text] = prompt
    positions = None
    if medium.grids:
        positions = mrope_positions(
            ids[: places[-1] + 1].tolist(), placeholder_token_id, medium.grids
        )
    fields = dict(vars(case))
    if len(prefix):
        fields |= {"prefix_ids": ids, "node_ids": nodes}
    else:
        fields |= {
            "node_ids": ids,
            "parents": np.arange(-1, len(ids) - 1),
            "rows": is_text.nonzero()[0][case.rows],
        }
    given = GivenPrompt(places, medium.pieces, positions)
    return GivenCase(**fields, given=given, medium=medium, places=places)
