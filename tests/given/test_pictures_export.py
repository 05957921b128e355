"""Kinds of pictures: encoder, logits and searches of exported engines against transformers."""

from dataclasses import replace

import numpy as np
import pytest

from dsbd_ort import Pipeline
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.whole_requests import decoded_together
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.parts.given.given_rows import GivenRows
from scripts.picture_checkpoints import PICTURE_MODELS, write_picture_model
from tests.exports import export_quietly
from tests.given.forests import LOGIT_LIMIT, check_forest
from tests.given.shown_pictures import (
    IN_CI,
    PictureModel,
    entry_of,
    export_kind,
    picture,
    pieces_of,
    request_of,
)
from tests.given.test_sharing import check_equal
from tests.robustness.preempting import TALLY, ForcedPreemptions

ENCODER_LIMIT, SCORE_LIMIT = 1e-5, 1e-5
SIZES = [(8, 8), (40, 90), (150, 60), (200, 64), (33, 250), (31, 31)]
SHOWN = [[(40, 90)], [(150, 60)], [(64, 64), (33, 120)]]  # the last: two pictures in a prompt
ERRORS: dict[tuple[str, str], float] = {}  # the largest of each kind and comparison


def seen(name, comparison, error, limit):
    ERRORS[name, comparison] = max(error, ERRORS.get((name, comparison), 0.0))
    assert error <= limit, (name, comparison)


@pytest.fixture(scope="module", autouse=True)
def table():
    """Print the errors of this run, as ``pytest -s`` shows them."""
    yield
    for (name, comparison), error in sorted(ERRORS.items()):
        print(f"\n{name:16} {comparison:24} {error:.1e}", end="")


NAMES = [
    pytest.param(name, marks=() if name in IN_CI else pytest.mark.long) for name in PICTURE_MODELS
]


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def pipe(name, picture_pipe):
    return picture_pipe(name)


@pytest.fixture(scope="module")
def reference(name, picture_model):
    return PictureModel(name, picture_model(name) / "target")


def test_the_encoder_gives_transformers_rows_of_transformers_pixels(pipe, reference, name):
    entry = entry_of(pipe)
    with pipe.models.engines() as (target, _):
        encoder = target.part(GivenRows).encoder
        for size in SIZES:
            pixels = picture(*size)
            wanted = reference.rows([pixels])
            found = np.concatenate([encoder.rows(piece) for piece in pieces_of(entry, pixels)])
            assert found.shape == wanted.shape
            assert entry.num_rows(size) == len(wanted)
            error = np.abs(found - wanted).max() / np.abs(wanted).max()
            seen(name, "encoder, of its scale", error, ENCODER_LIMIT)


@pytest.mark.parametrize("sizes", SHOWN, ids=str)
def test_logits_of_prompt_in_chunks_of_a_tree_and_below_a_kept_path(pipe, reference, name, sizes):
    shown = reference.shown(
        entry_of(pipe), [picture(*size, seed) for seed, size in enumerate(sizes)]
    )
    with pipe.models.engines() as (engine, _):
        errors = check_forest(engine, shown.inputs, lambda path: reference.logits(path, shown))
    for place, error in errors.items():
        seen(name, f"logits, {place}", error, LOGIT_LIMIT)


SEARCHES = [
    (1, {"strategy": "greedy"}),
    (4, {"strategy": "beam-search"}),
    (4, {"strategy": "speculative-beam-search", "drafter": "ngram", "draft_length": 3}),
]
DRAFTED = {"strategy": "speculative-beam-search", "draft_length": 3}


def check_searches(pipe, reference, name, searches, cases):
    entry = entry_of(pipe)
    for seed, sizes in cases:
        pictures = [picture(*size, seed + number) for number, size in enumerate(sizes)]
        shown = reference.shown(entry, pictures, seed)
        wanted = {beams: reference.searched(shown, beams, 14) for beams in (1, 4)}
        for beams, options in searches:
            of_beams = {"num_beams": beams, "num_return_sequences": beams}
            (result,) = pipe.models.decoded([request_of(pipe, shown, **options, **of_beams)])
            ids, scores = wanted[beams]
            assert [sequence.token_ids for sequence in result.sequences] == ids, (sizes, options)
            for sequence, score in zip(result.sequences, scores, strict=False):
                seen(name, "scores", abs(sequence.score - score), SCORE_LIMIT)


def test_searches_are_transformers(pipe, reference, name):
    check_searches(pipe, reference, name, SEARCHES, [(0, sizes) for sizes in SHOWN])


def test_text_alone_is_transformers(pipe, reference, name):
    check_searches(pipe, reference, name, SEARCHES, [(0, [])])


@pytest.mark.long
def test_more_searches(pipe, reference, name):
    cases = [(seed, sizes) for seed in (1, 2, 3) for sizes in ([SIZES[0]], [SIZES[4]], *SHOWN)]
    check_searches(pipe, reference, name, SEARCHES, cases)


@pytest.mark.long
def test_tiles_whose_sides_are_no_power_of_two(captures, tmp_path):
    """The places of 26 x 26 patches are rounded fractions of a tile, as published models have."""
    sizes = {"image_size": 364, "patch_size": 14}
    folder = write_picture_model(
        "idefics3",
        tmp_path / "target",
        vision=sizes,
        pictures={"max_image_size": {"longest_edge": 364}, "size": {"longest_edge": 728}},
    )
    bundle = export_quietly(captures, tmp_path / "bundle", folder)
    reference = PictureModel("idefics3", folder)
    with Pipeline.from_bundle(bundle, num_threads=1) as pipe, pipe.models.engines() as (target, _):
        pixels, encoder = picture(300, 100), target.part(GivenRows).encoder
        wanted = reference.rows([pixels])
        found = np.concatenate([encoder.rows(each) for each in pieces_of(entry_of(pipe), pixels)])
        assert len(found) == 3 * 169
        assert np.abs(found - wanted).max() <= ENCODER_LIMIT * np.abs(wanted).max()


@pytest.mark.long
@pytest.mark.parametrize("of_kind", ["idefics3", "paddleocr_vl"])
def test_searches_with_a_draft_that_reads_the_picture(of_kind, captures, tmp_path):
    folder = export_kind(captures, of_kind, tmp_path / "pair", has_draft=True)
    reference = PictureModel(of_kind, folder / "target")
    searches = [(1, DRAFTED), (4, {**DRAFTED, "draft_beams": 6})]
    with Pipeline.from_bundle(folder / "bundle", num_threads=1) as pipe:
        check_searches(pipe, reference, of_kind, searches, [(0, sizes) for sizes in SHOWN])


TOGETHER = [[SIZES[1]], [SIZES[2]], SHOWN[2], [SIZES[0]], [SIZES[1]], [SIZES[4]], [SIZES[5]], []]


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "beam-search", "num_beams": 4, "num_return_sequences": 4},
        pytest.param(
            {"strategy": "dsbd", "num_beams": 3, "num_return_sequences": 3, "drafter": "ngram"},
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda options: options["strategy"],
)
def test_eight_together_and_preempted_are_as_alone(pipe, reference, options):
    def requests():
        for seed, sizes in enumerate(TOGETHER):
            pictures = [picture(*size, seed + number) for number, size in enumerate(sizes)]
            shown = reference.shown(entry_of(pipe), pictures, seed)
            yield request_of(pipe, shown, **{**options, "seed": seed})

    alone = []
    for request in requests():
        with pipe.models.engines() as models:
            alone += decoded_together(BatchedDecoder(*models), [request], 1)
    with pipe.models.engines() as models:
        check_equal(decoded_together(BatchedDecoder(*models), list(requests()), 8), alone)
    before = TALLY.num_preempted
    preempted = [
        replace(request, preempts=ForcedPreemptions(seed))
        for seed, request in enumerate(requests())
    ]
    with pipe.models.engines() as models:
        check_equal(decoded_together(BatchedDecoder(*models), preempted, 8), alone)
    assert TALLY.num_preempted > before


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=() if each == "qwen3_vl" else pytest.mark.long)
        for each in PICTURE_MODELS
    ],
)
def test_the_text_part_alone_is_for_a_gpu(name, captures, tmp_path):
    target = write_picture_model(name, tmp_path / "target")
    bundle = export_quietly(
        captures, tmp_path / "bundle", target, text_only=True, dtype="fp16", form="webgpu"
    )
    entry = open_bundle(bundle).manifest.target
    assert (entry.given, entry.dtype, entry.form) == (None, "fp16", "webgpu")
    assert entry.unread_inputs and not (bundle / "target" / "encoder.onnx").exists()
