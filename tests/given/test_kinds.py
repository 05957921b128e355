"""Every kind of model that reads sounds or pictures: engines, prompts and searches.

References are transformers' models with transformers' own processors.
"""

import numpy as np
import pytest

from dsbd_ort import Pipeline
from dsbd_runtime.bundle_files.bundle import open_bundle
from scripts.picture_checkpoints import PICTURE_MODELS, write_picture_model
from scripts.qwen3_asr_checkpoint import write_qwen3_asr
from tests.exports import export_quietly
from tests.given.checks import STRATEGIES, check_forest, check_together
from tests.given.kinds import opened, params
from tests.given.picture_kinds import PictureKind, PictureReader
from tests.given.speech_kinds import QwenAsr


@pytest.fixture(scope="module", params=params())
def kind(request, media_folder):
    with opened(request.param, media_folder(request.param)) as kind:
        yield kind


def check_rows(kind, case):
    """Compare the encoder's rows of a case; return how many."""
    example = kind.example(case)
    found, wanted = kind.own_rows(example), kind.rows(example)
    assert found.shape == wanted.shape, case
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max(), case
    return len(found)


def test_encoders_give_transformers_rows(kind):
    for case in kind.encoded:
        check_rows(kind, case)


def test_prompts_are_the_processors(kind):
    if isinstance(kind, QwenAsr | PictureReader):
        pytest.skip("tests/speech/test_media_prompts.py and tests/picture_readers compare them")
    for example in kind.prompts():
        assert list(example.inputs.prompt_ids) == example.theirs["input_ids"][0].tolist()


def test_logits_of_prompt_in_chunks_of_a_tree_and_below_a_kept_path(kind):
    for case in kind.paths:
        example = kind.example(case)
        with kind.pipe.models.engines() as (engine, _):
            check_forest(
                engine, example.inputs, lambda path, given=example: kind.logits(path, given)
            )


SEARCHES = [
    (1, {"strategy": "greedy"}),
    (1, {"strategy": "speculative-beam-search", "num_beams": 1, "draft_length": 3}),
    (4, {"strategy": "beam-search"}),
    (4, {"strategy": "speculative-beam-search", "draft_length": 3, "draft_beams": 6}),
    (4, {"strategy": "speculative-beam-search", "drafter": "ngram", "draft_length": 3}),
]


def check_searches(kind, cases, seeds):
    for case in cases:
        for seed in seeds:
            example = kind.example(case, seed)
            wanted = {beams: kind.searched(example, beams) for beams in (1, 4)}
            for beams, options in SEARCHES:
                if "draft_beams" in options and not kind.pipe.has_draft:
                    continue
                of_beams = {"num_beams": beams, "num_return_sequences": beams} if beams > 1 else {}
                request = kind.request(example, **of_beams, **options)
                (result,) = kind.pipe.models.decoded([request])
                ids, scores = wanted[beams]
                assert [each.token_ids for each in result.sequences] == ids, (case, options)
                for sequence, score in zip(result.sequences, scores, strict=False):
                    assert sequence.score == pytest.approx(score, abs=1e-5)


def test_searches_with_and_without_drafts_are_transformers(kind):
    check_searches(kind, kind.read, (0,))


@pytest.mark.long
def test_more_searches(kind):
    check_searches(kind, kind.more, (1, 2, 3))


@pytest.mark.parametrize("options", STRATEGIES, ids=lambda options: options["strategy"])
def test_eight_together_and_preempted_are_as_alone(kind, options):
    if "draft_length" in options and not kind.pipe.has_draft:
        options = {**options, "drafter": "ngram"}
    results = check_together(kind.pipe, lambda: kind.requests(**options))
    assert len({round(result.sequences[0].logprob, 3) for result in results}) > 1


def test_typed_placeholders_stay_text(kind):
    if isinstance(kind, QwenAsr | PictureReader):
        pytest.skip("tests/speech/test_media_prompts.py types them; or has none")
    given, media = kind.pipe.bundle.manifest.target.given, kind.pipe.media
    token = given.placeholder_token_id
    spelled = kind.pipe.tokenizer.piece(token)
    typed = f"Is {spelled} or {spelled}{spelled} here?"
    number = list(media.read(kind.asked("the fox"))).count(token)
    for messages, wanted in (
        (kind.asked(typed), number),
        ([{"role": "user", "content": typed}], 0),
    ):
        prompt = list(media.read(messages))
        assert prompt.count(token) == wanted
        assert typed in kind.pipe.tokenizer.decode(prompt)  # which skips special tokens


PUBLISHED = {  # widths of the published models over 16, three layers of each part
    "0.6B": (
        {"d_model": 56, "encoder_attention_heads": 14, "encoder_ffn_dim": 224},
        {"hidden_size": 64, "intermediate_size": 192},
    ),
    "1.7B": (
        {"d_model": 64, "encoder_attention_heads": 16, "encoder_ffn_dim": 256},
        {"hidden_size": 128, "intermediate_size": 384},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_shapes_of_qwen3_asr(name, captures, tmp_path):
    """128 mels, windows of 8 s, 16 heads that share 8 of keys."""
    audio, text = PUBLISHED[name]
    audio |= {"num_mel_bins": 128, "n_window_infer": 800, "encoder_layers": 3}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8}
    folder = write_qwen3_asr(
        tmp_path / "target", audio=audio, deviation=0.1, num_hidden_layers=3, **heads, **text
    )
    export_quietly(captures, tmp_path / "bundle", folder)
    with opened("qwen3_asr", tmp_path) as kind:
        for num_frames in (50, 800, 801, 3_000):
            check_rows(kind, (num_frames,))


@pytest.mark.long
def test_tiles_whose_sides_are_no_power_of_two(captures, tmp_path):
    """The places of 26 x 26 patches are rounded fractions of a tile, as published models have."""
    folder = write_picture_model(
        "idefics3",
        tmp_path / "target",
        vision={"image_size": 364, "patch_size": 14},
        pictures={"max_image_size": {"longest_edge": 364}, "size": {"longest_edge": 728}},
    )
    export_quietly(captures, tmp_path / "bundle", folder)
    with opened("idefics3", tmp_path) as kind:
        assert check_rows(kind, ((100, 300),)) == 3 * 169


@pytest.mark.long
@pytest.mark.parametrize("name", ["idefics3", "paddleocr_vl"])
def test_searches_with_a_draft_that_reads_the_picture(name, captures, tmp_path):
    PictureKind.export(captures, name, tmp_path, has_draft=True)
    with Pipeline.from_bundle(tmp_path / "bundle", num_threads=1) as pipe:
        check_searches(PictureKind(name, pipe, tmp_path / "target"), PictureKind.shown, (0,))


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
