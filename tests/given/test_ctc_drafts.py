"""Text that the encoder of Granite Speech spells, as a draft: lossless, and what it saves."""

import numpy as np
import pytest

from dsbd_ort import Pipeline
from dsbd_runtime.parts.given.given_rows import GivenRows
from tests.given.checks import ENDS
from tests.given.speech_kinds import HEARD, SPELLED, asked, inputs_of
from tests.speech.sounds import noise

LENGTH = 14
OPTIONS = {"max_new_tokens": LENGTH, "eos_token_id": ENDS, "seed": 1}


@pytest.fixture(scope="module")
def pipe(media_folder):
    bundle = media_folder("granite_speech") / "bundle"
    with Pipeline.from_bundle(bundle, num_threads=1, ngram_pool=0) as opened:
        yield opened


def agreeing(pipe, inputs, bonus):
    """Options with which the model usually writes what is spelled; ``bonus`` in logits."""
    tokens = pipe.tokenizer.encode(SPELLED, add_special_tokens=False)
    size = len(inputs.prompt_ids)

    def favoured(path, scores):
        place = len(path) - size
        if place < len(tokens):
            scores[tokens[place]] += bonus
        return scores

    return {"logits_processors": [favoured]}


def test_what_is_heard_is_spelled(pipe):
    inputs = inputs_of(pipe, HEARD)
    copied = inputs.copied_ids
    assert copied() == []  # before the encoder has read the sound
    with pipe.models.engines() as (engine, _):
        engine.part(GivenRows).encoder.rows(inputs.source.pieces[0])
    assert pipe.tokenizer.decode(copied()) == SPELLED
    assert inputs_of(pipe, None).copied_ids == ()


def test_a_sound_whose_rows_are_in_the_cache_is_spelled_again(pipe):
    for _ in range(2):
        stats = pipe.transcribe(HEARD, num_beams=2, max_new_tokens=6, draft_length=3).stats
        assert stats.num_draft_tokens > 0


def test_labels_that_last_are_one_letter_and_others_have_no_text(pipe):
    medium = pipe.bundle.manifest.target.given.medium
    labels = np.array([0, 0, 104, 104, 0, 111, 111, 0, 111, 300, 300, 33, 233, 0])
    assert medium.spelled(labels) == "hoo!\xe9"
    assert medium.spelled(labels[:2]) == medium.spelled(labels[:0]) == ""


PAIRS = [
    ({"strategy": "greedy"}, {"strategy": "speculative-beam-search", "num_beams": 1}),
    ({"strategy": "sample"}, {"strategy": "speculative"}),
    (
        {"strategy": "beam-search", "num_beams": 3, "num_return_sequences": 3},
        {"strategy": "speculative-beam-search", "num_beams": 3, "num_return_sequences": 3},
    ),
    (
        {"strategy": "beam-sample", "num_beams": 3, "num_return_sequences": 3},
        {"strategy": "dsbd", "num_beams": 3, "num_return_sequences": 3},
    ),
]


@pytest.mark.parametrize(("plain", "drafted"), PAIRS, ids=lambda each: each["strategy"])
@pytest.mark.parametrize("bonus", [0.0, 6.0, 20.0])
def test_drafts_change_nothing(pipe, plain, drafted, bonus):
    for seed, samples in enumerate((HEARD, noise(0.5), noise(2.0))):
        results = []
        for options in (plain, drafted):
            inputs = inputs_of(pipe, samples)
            known = {**OPTIONS, **options, **agreeing(pipe, inputs, bonus), "seed": seed}
            results += pipe.models.decoded([pipe.request_of(inputs, known)])
        ours, theirs = (
            [(each.token_ids, pytest.approx(each.logprob, abs=1e-5)) for each in result.sequences]
            for result in results
        )
        assert ours == theirs


def calls_of(pipe, samples, **options):
    inputs = inputs_of(pipe, samples)
    known = {**OPTIONS, **agreeing(pipe, inputs, 30.0), **options}
    [result] = pipe.models.decoded([pipe.request_of(inputs, known)])
    stats = result.stats
    return stats.num_output_tokens, stats.num_iterations


def test_tokens_a_call_with_a_head_that_agrees(pipe):
    """A default request drafts by what is heard; each call then yields several tokens."""
    options = {"strategy": "speculative-beam-search", "num_beams": 1, "draft_length": 6}
    tokens, iterations = calls_of(pipe, HEARD, **options)
    assert tokens == LENGTH and iterations <= 3  # 7 tokens a call, but at the beginning
    without = calls_of(pipe, noise(1.2, 8), **options)  # spells something else
    assert without[0] == LENGTH and without[1] > iterations
    assert calls_of(pipe, HEARD, strategy="greedy") == (LENGTH, LENGTH)


def test_chats_and_transcriptions_draft_by_it(pipe):
    found = pipe.generate(
        asked(HEARD),
        strategy="speculative-beam-search",
        num_beams=1,
        max_new_tokens=4,
        draft_length=3,
    )
    assert found.stats.drafter == "ngram" and found.stats.num_draft_tokens > 0
    heard = pipe.transcribe(HEARD, num_beams=2, max_new_tokens=6, draft_length=3)
    assert heard.stats.drafter == "ngram" and heard.stats.num_draft_tokens > 0
