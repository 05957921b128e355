"""Requests with sounds together, preempted, and one after the other: rows computed and results."""

from dataclasses import replace

import numpy as np
import pytest

from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.whole_requests import decoded_together
from dsbd_runtime.parts.given.given_rows import GivenRows
from tests.given.sounds import SYSTEM, inputs_of, noise, prompt_of, request_of
from tests.robustness.preempting import TALLY, ForcedPreemptions

STRATEGIES = [
    {"strategy": "greedy"},
    {"strategy": "beam-search", "num_beams": 4, "num_return_sequences": 4},
    {
        **{"strategy": "speculative-beam-search", "num_beams": 4, "num_return_sequences": 4},
        **{"draft_length": 3, "draft_beams": 6},
    },
    {"strategy": "dsbd", "num_beams": 3, "draft_length": 3, "num_return_sequences": 3},
]
FRAMES = (37, 100, 150, 237, 237, 400, 50, None)  # one request of text alone


class Counted:
    """An engine, and how many rows its forwards had."""

    def __init__(self, engine):
        self._engine, self.spec, self.num_rows_computed = engine, engine.spec, 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def forward(self, forward):
        self.num_rows_computed += forward.num_new
        return self._engine.forward(forward)


def requests_of(pipe, options):
    requests = []
    for seed, number in enumerate(FRAMES):
        sounds = [] if number is None else [noise(number, seed)]
        inputs = inputs_of(pipe, prompt_of(len(sounds), seed), sounds)
        requests.append(request_of(pipe, inputs, **{**options, "seed": seed}))
    return requests


def check_equal(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        for one, other in zip(ours.sequences, theirs.sequences, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprob == pytest.approx(other.logprob, abs=2e-5)


@pytest.mark.parametrize("options", STRATEGIES, ids=lambda options: options["strategy"])
def test_eight_together_and_preempted_are_as_alone(given_pipe, options):
    check_together(given_pipe, options)


def check_together(pipe, options):
    """Compare eight requests together, and preempted, with each alone; return the latter."""
    alone = []
    for request in requests_of(pipe, options):
        with pipe.models.engines() as models:
            alone += decoded_together(BatchedDecoder(*models), [request], 1)
    with pipe.models.engines() as models:
        together = decoded_together(BatchedDecoder(*models), requests_of(pipe, options), 8)
    check_equal(together, alone)
    before = TALLY.num_preempted
    preempted = [
        replace(request, preempts=ForcedPreemptions(seed))
        for seed, request in enumerate(requests_of(pipe, options))
    ]
    with pipe.models.engines() as models:
        check_equal(decoded_together(BatchedDecoder(*models), preempted, 8), alone)
    assert TALLY.num_preempted > before
    return alone


def one_by_one(pipe, prompts):
    """Return what each request computed: rows of the target, and runs of its encoder."""
    counts = []
    with pipe.models.engines() as (target, _):
        counted, encoder = Counted(target), target.part(GivenRows).encoder
        decoder = BatchedDecoder(counted, None)
        for prompt, sounds in prompts:
            rows, runs = counted.num_rows_computed, encoder.num_read
            request = request_of(
                pipe, inputs_of(pipe, prompt, sounds), strategy="greedy", max_new_tokens=1
            )
            decoded_together(decoder, [request], 1)
            counts.append((counted.num_rows_computed - rows, encoder.num_read - runs))
    return counts


def test_a_system_turn_is_shared_by_sounds_and_a_sound_by_questions(given_pipe):
    """A sound of 237 frames has 31 rows and two windows, the first of them 26 rows."""
    one, other = noise(237), noise(237, 1)
    alike = one.copy()
    alike[:, 200:] = other[:, 200:]
    first = prompt_of(1, 0)
    question = [*first[:-1], first[-1] + 1]
    counts = one_by_one(
        given_pipe,
        [(first, [one]), (first, [other]), (first, [one]), (question, [one]), (first, [alike])],
    )
    whole = len(first) - 1 + 31
    assert counts[0] == (whole, 2)
    assert counts[1] == (whole - len(SYSTEM), 2)  # the system turn alone is shared
    assert counts[2] == (1, 0)  # all but the last token, of which the logits are needed
    assert counts[3] == (1, 0)  # the last token alone is another: no encoder runs
    assert counts[4] == (whole - len(SYSTEM) - 26, 0)  # both windows were read before


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
        with pipe.models.engines() as models:
            request = request_of(pipe, each, **options)
            check_equal([found], decoded_together(BatchedDecoder(*models), [request], 1))
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
