"""Requests with media one after the other: rows computed, and results."""

from functools import partial

import numpy as np
import pytest

from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.whole_requests import decoded_together
from dsbd_runtime.parts.given.given_rows import GivenRows
from tests.given.checks import check_equal, together
from tests.given.pictures import asked, picture
from tests.given.sounds import SYSTEM, inputs_of, noise, prompt_of, request_of


class Counted:
    """An engine, and how many rows its forwards had."""

    def __init__(self, engine):
        self._engine, self.spec, self.num_rows_computed = engine, engine.spec, 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def forward(self, forward):
        self.num_rows_computed += forward.num_new
        return self._engine.forward(forward)


def one_by_one(pipe, make):
    """Return what each request computed: rows of the target, and runs of its encoder.

    make: functions that prepare a request.
    """
    counts = []
    with pipe.models.engines() as (target, _):
        counted, encoder = Counted(target), target.part(GivenRows).encoder
        decoder = BatchedDecoder(counted, None)
        for prepared in make:
            rows, runs = counted.num_rows_computed, encoder.num_read
            decoded_together(decoder, [prepared(strategy="greedy", max_new_tokens=1)], 1)
            counts.append((counted.num_rows_computed - rows, encoder.num_read - runs))
    return counts


def test_a_system_turn_is_shared_by_sounds_and_a_sound_by_questions(given_pipe):
    """A sound of 237 frames has 31 rows and two windows, the first of them 26 rows."""
    one, other = noise(237), noise(237, 1)
    alike = one.copy()
    alike[:, 200:] = other[:, 200:]
    first = prompt_of(1, 0)
    question = [*first[:-1], first[-1] + 1]

    def heard(prompt, sound):
        return partial(request_of, given_pipe, inputs_of(given_pipe, prompt, [sound]))

    asked = [(first, one), (first, other), (first, one), (question, one), (first, alike)]
    counts = one_by_one(given_pipe, [heard(*each) for each in asked])
    whole = len(first) - 1 + 31
    assert counts[0] == (whole, 2)
    assert counts[1] == (whole - len(SYSTEM), 2)  # the system turn alone is shared
    assert counts[2] == (1, 0)  # all but the last token, of which the logits are needed
    assert counts[3] == (1, 0)  # the last token alone is another: no encoder runs
    assert counts[4] == (whole - len(SYSTEM) - 26, 0)  # both windows were read before


@pytest.mark.parametrize("name", ["granite_docling", "paddleocr_vl"])
def test_another_question_to_a_page_computes_the_question_alone(media_pipe, name):
    pipe, page = media_pipe(name), picture(90, 60)
    chats = [
        asked(image, text=text)
        for image, text in ((page, "Who?"), (page, "The other fox?"), (picture(90, 60, 1), "Who?"))
    ]
    counts = one_by_one(
        pipe, [lambda chat=chat, **options: pipe.prepare(chat, options) for chat in chats]
    )
    whole, other = pipe.chat_prompt(chats[0]), pipe.chat_prompt(chats[1])
    placeholder = pipe.bundle.manifest.target.given.placeholder_token_id
    assert counts[0][0] == len(whole) and counts[0][1] > 0
    alike = next(n for n, (one, two) in enumerate(zip(whole, other, strict=False)) if one != two)
    assert alike > len(whole) - whole[::-1].index(placeholder)
    assert counts[1] == (len(other) - alike, 0)  # no row of the page, and no encoder
    assert counts[2][0] == len(whole) - whole.index(placeholder) and counts[2][1] > 0


def test_the_pipeline_keeps_a_prefix_for_the_next_sound(given_pipe):
    check_in_turn(given_pipe, {"strategy": "beam-search"})


def check_in_turn(pipe, options):
    """Compare results after another request's rows with those of an empty cache."""
    sounds = [noise(150, seed) for seed in range(3)]
    inputs = [inputs_of(pipe, prompt_of(1, 0), [sound]) for sound in sounds]
    text = inputs_of(pipe, SYSTEM, [])
    options = {"num_beams": 3, "num_return_sequences": 3, **options}
    in_turn = [
        pipe.models.decoded([request_of(pipe, each, **options)])[0]
        for each in (*inputs, text, inputs[0])
    ]
    for each, found in zip((*inputs, text, inputs[0]), in_turn, strict=True):
        check_equal([found], together(pipe, [request_of(pipe, each, **options)]))
    assert in_turn[0].sequences[0].token_ids != in_turn[1].sequences[0].token_ids


def test_given_rows_count_as_memory_until_all_rows_go(given_pipe):
    inputs = inputs_of(given_pipe, prompt_of(1), [noise(237)])
    with given_pipe.models.engines() as (target, _):
        assert target.part(GivenRows).num_bytes == 0
        before = target.kv_bytes
        decoder = BatchedDecoder(target, None)
        request = request_of(given_pipe, inputs, strategy="greedy", max_new_tokens=2)
        decoded_together(decoder, [request], 1)
        width = given_pipe.bundle.manifest.target.given.row_width
        assert target.part(GivenRows).num_bytes == 31 * width * 4
        assert target.kv_bytes_peak >= before + 31 * width * 4
        target.keep(np.arange(0))
        assert target.part(GivenRows).num_bytes == 0
