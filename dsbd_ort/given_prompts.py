"""Prompts with sounds: tokens and features as the inputs of a request.

The engine reads a sound as rows of its encoder. In the tokens of a prompt one placeholder stands
for each sound; here it becomes as many as the sound has rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.prompts import RequestInputs
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.given_prompt import GivenPrompt
from dsbd_runtime.parts.given_rows import GivenEntry


def given_inputs(
    given: GivenEntry, prompt_ids: Sequence[int], sounds: Sequence[NDArray[np.float32]]
) -> RequestInputs:
    """Return the inputs of a request whose prompt has sounds; without any, of text alone.

    With a placeholder 9 and a sound of 3 rows the tokens [1, 9, 2] become [1, 9, 9, 9, 2].

    prompt_ids: with one placeholder for each sound, in their order.
    sounds: features (num_mels, num_frames) of each, without padding.

    Raises InputError for another number of placeholders, or features of another shape.
    """
    placeholder = given.placeholder_token_id
    if (number := list(prompt_ids).count(placeholder)) != len(sounds):
        raise InputError(
            f"the prompt has {number} placeholders (token {placeholder}) for {len(sounds)} sounds; "
            "expected one for each"
        )
    if not sounds:
        return RequestInputs(list(prompt_ids))
    pieces_of_each = [given.medium.pieces(features) for features in sounds]
    sizes = iter([sum(piece.num_rows for piece in pieces) for pieces in pieces_of_each])
    token_ids: list[int] = []
    for token in prompt_ids:
        token_ids += [token] * (next(sizes) if token == placeholder else 1)
    pieces = [piece for pieces in pieces_of_each for piece in pieces]
    return RequestInputs(token_ids, GivenPrompt.at_placeholders(token_ids, placeholder, pieces))
