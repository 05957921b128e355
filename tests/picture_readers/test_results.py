"""Results of picture readers with their own defaults; pixels; tests/given compares the rest."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_ort.media.pictures import read_picture, resized
from scripts.picture_reader_checkpoint import BEGIN
from tests.given.picture_kinds import PictureReader
from tests.picture_readers.pages import message, page

SIZES = ((90, 40), (40, 90), (8, 8), (700, 500))


@pytest.fixture(scope="module")
def reader_of(trocr, trocr_folder, donut, donut_folder):
    """A function that returns the pipeline of a kind, and its checkpoint in transformers."""
    known = {"trocr": (trocr, trocr_folder), "donut": (donut, donut_folder)}
    return functools.cache(
        lambda name: PictureReader(name, known[name][0], known[name][1] / "target")
    )


def generated(reader, picture, begin=(BEGIN,), **options):
    """Return the tokens of transformers' own ``generate``, and the score."""
    with quiet_libraries():
        found = reader.model.generate(
            pixel_values=reader.pixels(picture),
            decoder_input_ids=torch.tensor([list(begin)]),
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    row = found.sequences[0, len(begin) :].tolist()
    return row[: row.index(1) + 1] if 1 in row else row, float(found.sequences_scores[0])


def test_the_defaults_of_generation_config(trocr, reader_of):
    """Four beams, early stopping, a penalty of length, no n-gram twice, 23 tokens at most."""
    for seed in range(4):
        ids, score = generated(reader_of("trocr"), page(seed))
        (best,) = trocr.generate(message(page(seed))).sequences
        assert best.token_ids == ids
        assert best.score == pytest.approx(score, abs=1e-5)
        assert trocr.generate(message(page(seed)), draft_length=3).stats.num_draft_tokens > 0


def test_a_task_of_donut_begins_its_output_and_its_end_is_forced(donut, reader_of):
    task = "def read"
    begin = donut.tokenizer.encode(task, add_special_tokens=False)
    ids, _ = generated(reader_of("donut"), page(), begin, max_new_tokens=5, eos_token_id=[1])
    (best,) = donut.generate(message(page(), task), max_new_tokens=5).sequences
    assert best.token_ids == ids
    assert best.token_ids[-1] == 1


def test_a_list_of_pictures_gives_a_result_each(trocr):
    pictures = [page(seed) for seed in range(3)]
    found = trocr.generate([message(picture) for picture in pictures])
    wanted = [trocr.generate(message(picture)) for picture in pictures]
    assert [r.sequences[0].text for r in found] == [r.sequences[0].text for r in wanted]


@pytest.mark.parametrize("size", [*SIZES, (90, 5), (5, 90), (1, 1), (48, 64), (64, 48), (333, 334)])
@pytest.mark.parametrize("name", ["trocr", "donut"])
def test_pixels_are_those_of_transformers(name, size, reader_of):
    reader, picture = reader_of(name), page(0, size)
    entry = reader.pipe.bundle.manifest.target.encoder.picture
    wanted = reader.pixels(picture)[0].numpy()
    found = entry.source(read_picture(picture), resized).values
    np.testing.assert_array_equal(found, wanted)


def test_a_picture_may_be_turned_first(donut, reader_of):
    entry = replace(donut.bundle.manifest.target.encoder.picture, is_turned=True)
    reference = reader_of("donut")
    for size in SIZES:
        made = reference.processor(page(0, size), do_align_long_axis=True, return_tensors="np")
        found = entry.source(read_picture(page(0, size)), resized).values
        np.testing.assert_array_equal(found, made["pixel_values"][0])


def test_one_picture_is_one_source(trocr):
    read = [trocr.chat_prompt(message(page(seed))).inputs.source for seed in (0, 0, 1)]
    assert read[0] == read[1] != read[2]
    assert trocr.bundle.entry("draft").encoder.is_shared  # as the draft's encoder is the target's
    assert repr(read[0]) == "PicturePixels(3 channels, 32 height, 32 width)"
