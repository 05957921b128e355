"""Prompts as token ids: collections with an order, and no others."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from dsbd_ort.prompts import prompt_ids
from dsbd_runtime.errors import InputError
from dsbd_runtime.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_bundle):
    return Tokenizer.from_bundle(tiny_bundle)


IDS = [3, 4, 5]
ORDERED = [IDS, (3, 4, 5), range(3, 6), np.array(IDS), np.array(IDS, np.uint8), np.arange(9)[3:6]]


@pytest.mark.parametrize("prompt", [*ORDERED, deque(IDS)], ids=lambda p: type(p).__name__)
def test_ids_in_order_are_taken(tokenizer, prompt):
    assert prompt_ids(tokenizer, prompt) == IDS


UNORDERED = [
    set(IDS),
    frozenset(IDS),
    dict.fromkeys(IDS),
    dict.fromkeys(IDS).keys(),
    {1: 3}.values(),
    iter(IDS),
    (token for token in IDS),
    b"abc",
    bytearray(b"abc"),
    memoryview(b"abc"),
    None,
    7,
    np.int64(7),
]


@pytest.mark.parametrize("prompt", UNORDERED, ids=lambda prompt: type(prompt).__name__)
def test_what_has_no_order_is_refused(tokenizer, prompt):
    with pytest.raises(InputError, match=f"the prompt is a {type(prompt).__name__}; expected a te"):
        prompt_ids(tokenizer, prompt)


@pytest.mark.parametrize("prompt", [np.array(7), np.zeros((1, 3), np.int64)])
def test_an_array_has_one_dimension(tokenizer, prompt):
    with pytest.raises(InputError, match=f"an array of {prompt.ndim} dimensions"):
        prompt_ids(tokenizer, prompt)
