"""Conversations with pictures: prompts and searches are those of transformers' own processor."""

from collections.abc import Callable
from typing import Any

import pytest

from dsbd_ort import Pipeline
from tests.given.pictures import PictureReference, asked, picture

LONG = ("smolvlm", "granite_docling", "paddleocr_vl")
KINDS = (
    "idefics3",
    "qwen3_vl",
    *(pytest.param(name, marks=pytest.mark.long) for name in LONG),
)
SIZES = ((90, 60), (33, 150), (8, 8))  # width, height

Opener = Callable[[str], Pipeline]
References = Callable[[str], PictureReference]


def conversations() -> list[list[dict[str, Any]]]:
    one, two = picture(90, 60), picture(40, 130, 1)
    first, again = asked(one, text="What does it say?"), asked(two)
    system = {"role": "system", "content": [{"type": "text", "text": "The quick fox"}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "the other page"}]}
    text = {"type": "text", "text": "The page shows"}
    between = [{"type": "image", "image": one}, text, {"type": "image", "image": two}, text]
    return [
        [system, *asked(one, two)],
        [*first, answer, *again],
        [{"role": "user", "content": between}],
    ]


@pytest.mark.parametrize("name", KINDS)
def test_prompts_are_transformers(
    picture_pipe: Opener, picture_reference: References, name: str
) -> None:
    pipe, reference = picture_pipe(name), picture_reference(name)
    alone = [asked(picture(*size, seed)) for seed, size in enumerate(SIZES)]
    for messages in (*alone, *conversations()):
        wanted = reference.inputs(messages)["input_ids"][0].tolist()
        assert pipe.chat_prompt(messages) == wanted


def check_searches(pipe: Pipeline, reference: PictureReference, messages: Any) -> None:
    inputs = reference.inputs(messages)
    for beams in (1, 4):
        options: dict[str, Any] = {"strategy": "greedy"}
        if beams > 1:
            options = {"strategy": "beam-search", "num_beams": 4, "num_return_sequences": 4}
        result = pipe.generate(messages, max_new_tokens=10, **options)
        ids, scores = reference.searched(inputs, beams, 10)
        assert [sequence.token_ids for sequence in result.sequences] == ids
        for sequence, score in zip(result.sequences, scores, strict=False):
            assert sequence.score == pytest.approx(score, abs=2e-5)


@pytest.mark.parametrize("name", KINDS)
def test_searches_are_transformers(
    picture_pipe: Opener, picture_reference: References, name: str
) -> None:
    pipe, reference = picture_pipe(name), picture_reference(name)
    check_searches(pipe, reference, asked(picture(90, 60)))
    check_searches(pipe, reference, conversations()[1])
