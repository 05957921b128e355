"""Encoder, logits and searches of exported picture readers against transformers; together."""

import functools
from dataclasses import replace

import numpy as np
import pytest

import dsbd_ort
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.whole_requests import decoded_together
from dsbd_ort.media.pictures import read_picture, resized
from dsbd_ort.requests.prompts import RequestInputs
from dsbd_runtime.parts.source.sources import Sources
from scripts.picture_reader_checkpoint import BEGIN, KINDS
from tests.given.forests import check_forest
from tests.picture_readers.pages import ENDS, Reference, export_reader, message, page
from tests.robustness.preempting import TALLY, ForcedPreemptions

SIZES = ((90, 40), (40, 90), (8, 8), (700, 500))


@functools.cache
def reference_of(folder):
    return Reference.of(folder)


def check_logits(pipe, reference, picture):
    """The encoder's hidden states, and logits of a prompt in chunks, a tree, and a kept path."""
    source = pipe.bundle.manifest.target.encoder.picture.source(read_picture(picture), resized)
    prompt = [BEGIN, *np.random.default_rng(3).integers(3, 280, 16).tolist()]
    with pipe.models.engines() as (engine, _):
        encoder = engine.part(Sources).encoder
        encoder.keep_hidden()
        hidden, own = encoder.hidden_states(source).numpy(), reference.hidden(picture)
        assert hidden.shape == own.shape
        assert np.abs(hidden - own).max() <= 1e-5 * np.abs(own).max()
        inputs = RequestInputs(prompt, source)
        check_forest(engine, inputs, lambda path: reference.logits(path, picture))


SEARCHES = [
    (1, {"strategy": "greedy"}),
    (1, {"strategy": "speculative-beam-search", "num_beams": 1, "draft_length": 3}),
    (4, {"strategy": "beam-search"}),
    (4, {"strategy": "speculative-beam-search", "draft_length": 3, "draft_beams": 6}),
    (4, {"strategy": "speculative-beam-search", "drafter": "ngram", "draft_length": 3}),
]
PLAIN = {"early_stopping": False, "length_penalty": 1.0, "no_repeat_ngram_size": 0}


def check_searches(pipe, reference, picture, begin=(BEGIN,), text=None):
    known = {"max_new_tokens": 14, "forced_eos_token_id": None, **PLAIN}
    for beams, options in SEARCHES:
        if not pipe.has_draft and "draft_length" in options and "drafter" not in options:
            continue
        theirs = {"num_beams": beams, "num_return_sequences": beams}
        more = {**known, **theirs, "eos_token_id": list(ENDS), "do_sample": False}
        ids, scores = reference.searched(picture, begin, **more)
        ours = {**known, **(theirs if beams > 1 else {}), **options, "eos_token_id": ENDS}
        found = pipe.generate(message(picture, text), **ours).sequences
        assert [each.token_ids for each in found] == ids, options
        for each, score in zip(found, scores, strict=False):
            assert each.score == pytest.approx(score, abs=1e-5)


def test_logits_of_trocr(trocr, trocr_folder):
    check_logits(trocr, reference_of(trocr_folder / "target"), page())


def test_searches_of_trocr(trocr, trocr_folder):
    for seed, size in enumerate(SIZES[:2]):
        check_searches(trocr, reference_of(trocr_folder / "target"), page(seed, size))


def test_the_defaults_of_generation_config(trocr, trocr_folder):
    """Four beams, early stopping, a penalty of length, no n-gram twice, 23 tokens at most."""
    for seed in range(4):
        ids, scores = reference_of(trocr_folder / "target").searched(page(seed))
        (best,) = trocr.generate(message(page(seed))).sequences
        assert best.token_ids == ids[0]
        assert best.score == pytest.approx(scores[0], abs=1e-5)
        assert trocr.generate(message(page(seed)), draft_length=3).stats.num_draft_tokens > 0


def test_a_task_of_donut_begins_its_output_and_its_end_is_forced(donut, donut_folder):
    """Its encoder is narrower than its decoder, and reads pages by their proportions."""
    reference = reference_of(donut_folder / "target")
    check_logits(donut, reference, page(1, (70, 50)))
    task = "def read"
    begin = donut.tokenizer.encode(task, add_special_tokens=False)
    check_searches(donut, reference, page(), begin, task)
    ids, _ = reference.searched(page(), begin, max_new_tokens=5, eos_token_id=[1])
    (best,) = donut.generate(message(page(), task), max_new_tokens=5).sequences
    assert best.token_ids == ids[0]
    assert best.token_ids[-1] == 1


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_with_pictures_of_all_sizes(kind, captures, tmp_path):
    folder = export_reader(kind, captures, tmp_path)
    reference = Reference.of(folder / "target")
    with dsbd_ort.Pipeline.from_bundle(folder / "bundle", num_threads=1) as pipe:
        for seed, size in enumerate(SIZES):
            check_logits(pipe, reference, page(seed, size))
            check_searches(pipe, reference, page(seed, size))


STRATEGIES = [options for _, options in SEARCHES[2:4]] + [{"strategy": "dsbd", "draft_length": 3}]


def requests_of(pipe, options):
    known = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 14, **PLAIN, **options}
    pictures = [page(seed) for seed in (0, 1, 2, 3, 3, 4, 5, 6)]
    return [
        pipe.prepare(message(picture), {**known, "seed": seed})
        for seed, picture in enumerate(pictures)
    ]


@pytest.mark.parametrize("options", STRATEGIES, ids=lambda options: options["strategy"])
def test_eight_together_and_preempted_are_as_alone(trocr, options):
    alone = []
    for request in requests_of(trocr, options):
        with trocr.models.engines() as models:
            alone += decoded_together(BatchedDecoder(*models), [request], 1)
    preempted = [
        replace(request, preempts=ForcedPreemptions(seed))
        for seed, request in enumerate(requests_of(trocr, options))
    ]
    before = TALLY.num_preempted
    for requests in (requests_of(trocr, options), preempted):
        with trocr.models.engines() as models:
            found = decoded_together(BatchedDecoder(*models), requests, 8)
        for ours, theirs in zip(found, alone, strict=True):
            for one, other in zip(ours.sequences, theirs.sequences, strict=True):
                assert one.token_ids == other.token_ids
                assert one.logprob == pytest.approx(other.logprob, abs=2e-5)
    assert TALLY.num_preempted > before
    assert alone[0].sequences[0].token_ids != alone[1].sequences[0].token_ids


def test_a_list_of_pictures_gives_a_result_each(trocr):
    pictures = [page(seed) for seed in range(3)]
    found = trocr.generate([message(picture) for picture in pictures])
    wanted = [trocr.generate(message(picture)) for picture in pictures]
    assert [r.sequences[0].text for r in found] == [r.sequences[0].text for r in wanted]


@pytest.mark.parametrize("size", [*SIZES, (90, 5), (5, 90), (1, 1), (48, 64), (64, 48), (333, 334)])
@pytest.mark.parametrize("name", ["trocr", "donut"])
def test_pixels_are_those_of_transformers(name, size, request):
    pipe, folder = request.getfixturevalue(name), request.getfixturevalue(f"{name}_folder")
    picture = page(0, size)
    entry = pipe.bundle.manifest.target.encoder.picture
    wanted = reference_of(folder / "target").pixels(picture)[0].numpy()
    found = entry.source(read_picture(picture), resized).values
    np.testing.assert_array_equal(found, wanted)


def test_a_picture_may_be_turned_first(donut, donut_folder):
    entry = replace(donut.bundle.manifest.target.encoder.picture, is_turned=True)
    reference = reference_of(donut_folder / "target")
    for size in SIZES:
        made = reference.processor(page(0, size), do_align_long_axis=True, return_tensors="np")
        found = entry.source(read_picture(page(0, size)), resized).values
        np.testing.assert_array_equal(found, made["pixel_values"][0])


def test_one_picture_is_one_source(trocr):
    read = [trocr.chat_prompt(message(page(seed))).inputs.source for seed in (0, 0, 1)]
    assert read[0] == read[1] != read[2]
    assert trocr.bundle.entry("draft").encoder.is_shared  # as the draft's encoder is the target's
    assert repr(read[0]) == "PicturePixels(3 channels, 32 height, 32 width)"
