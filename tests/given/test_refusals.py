"""Checkpoints, pairs and bundles of models that read media and are refused, with the reason."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.given_prompt.checkpoint import GivenCheckpoint
from dsbd_export.opening import check_pair, kind_of, open_pair
from dsbd_ort.requests.prompts import RequestInputs
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.bundle_files.manifest import MANIFEST_NAME, manifest_from_file
from dsbd_runtime.errors import BundleError, InputError, ProviderError
from dsbd_runtime.loading import load_causal_lm
from dsbd_runtime.media.given_grid import GridPicture
from dsbd_runtime.media.given_picture import CanvasPicture, TiledPicture
from scripts.family_checkpoints import write_family_checkpoint
from scripts.picture_checkpoints import PICTURE_MODELS, write_picture_model
from scripts.qwen3_asr_checkpoint import write_qwen3_asr

SETTINGS, CONFIG = "preprocessor_config.json", "config.json"


def opened(folder, draft=None, **options):
    config = ExportConfig(
        target=str(folder), draft=draft and str(draft), output=folder / "bundle", **options
    )
    target, of_draft = open_pair(config)
    check_pair(target, of_draft, config)
    return target


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints by the names of their kinds."""
    folder = tmp_path_factory.mktemp("checkpoints")
    pictures = {name: write_picture_model(name, folder / name) for name in PICTURE_MODELS}
    return {"qwen3_asr": write_qwen3_asr(folder / "qwen3_asr"), **pictures}


@pytest.fixture(scope="module")
def folder(written):
    return written["qwen3_asr"]


def test_the_checkpoint_is_of_its_kind(folder):
    checkpoint = opened(folder)
    assert isinstance(checkpoint, GivenCheckpoint)
    assert checkpoint.unread_inputs is None
    assert "merge it" in kind_of(checkpoint).without_adapters


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "fp16"}, "dtype='fp16' is not supported .* use dtype='fp32'"),
        ({"form": "webgpu"}, "form='webgpu' is not supported"),
        ({"dtype": "fp16", "engine": "tensorrt-rtx"}, "is not supported .* on the CPU"),
        ({"max_source": 20}, "max_source=20 has no meaning"),
        ({"features": True}, "features=True is not supported for the target"),
    ],
)
def test_options(folder, options, words):
    if "engine" in options:
        options = {**options, "compute_capability": "12.0"}
    with pytest.raises(ExportError, match=words):
        opened(folder, **options)


ENTRIES = {
    "idefics3": (TiledPicture, {"tile_size": 32, "tile_rows": 4, "longest_edge": 128}, 0, 1),
    "smolvlm": (TiledPicture, {"tile_size": 32, "tile_rows": 4, "resample": 1}, 0, 1),
    "granite_docling": (CanvasPicture, {"least_tiles": 1, "most_tiles": 6, "tile_rows": 4}, 2, 1),
    "paddleocr_vl": (
        *(GridPicture, {"sizing": "area-from-units", "least_pixels": 3136, "positions_side": 4}),
        *(0, 3),
    ),
    "qwen3_vl": (
        GridPicture,
        {"most_pixels": 6144, "positions_side": 6, "align_corners": True},
        2,
        3,
    ),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_are_of_the_config_and_the_processor_files(written, name):
    kind, fields, levels, axes = ENTRIES[name]
    given = opened(written[name]).given
    assert type(given.medium) is kind
    assert {field: getattr(given.medium, field) for field in fields} == fields
    assert (given.levels, given.position_axes, given.width) == (levels, axes, 32)


def changed(folder, tmp_path, file, change):
    """Return a copy of a checkpoint with other content of one of its files."""
    copied = Path(shutil.copytree(folder, tmp_path / "changed"))
    content = json.loads((copied / file).read_text())
    change(content)
    (copied / file).write_text(json.dumps(content))
    return copied


ALIGNER = "Qwen3ASRForTokenClassification"
CHANGES = [  # kind, file, other values (of "audio_config", or of the file), words
    ("qwen3_asr", CONFIG, {"thinker_config": {}}, "whose name ends in -hf"),
    ("qwen3_asr", CONFIG, {"architectures": [ALIGNER]}, "writes no text"),
    ("qwen3_asr", CONFIG, {"audio_config": {"output_dim": 24}}, "returns rows of 24 numbers"),
    ("qwen3_asr", CONFIG, {"audio_token_id": 9_999}, "placeholder_token_id is 9999"),
    ("qwen3_asr", CONFIG, {"audio_config": {"n_window_infer": 250}}, "window_frames is 250"),
    ("qwen3_asr", SETTINGS, {"feature_size": 80}, "80 mels, its encoder reads 16"),
    ("qwen3_asr", SETTINGS, {"dither": 0.1}, "made with noise"),
    ("qwen3_asr", SETTINGS, {"hop_length": 0}, "hop_length is 0"),
    ("qwen3_asr", SETTINGS, {"hop_length": "x"}, "hop_length is 'x'"),
    (
        "idefics3",
        SETTINGS,
        {"do_image_splitting": False},
        "do_image_splitting False, expected True",
    ),
    ("idefics3", SETTINGS, {"max_image_size": {"longest_edge": 64}}, "tile .* is 64, .* reads 32"),
    ("granite_docling", SETTINGS, {"size": {"height": 16, "width": 16}}, "is 16, .* reads 32"),
    ("granite_docling", SETTINGS, {"fine_route": True}, "fine_route True, expected False"),
    ("granite_docling", SETTINGS, {"max_patches": 0}, "most_tiles is 0|least_tiles"),
    ("paddleocr_vl", SETTINGS, {"patch_size": 16}, "patch_size .* is 16, its encoder reads 14"),
    ("qwen3_vl", SETTINGS, {"merge_size": 1}, "merge_size .* is 1, its encoder reads 2"),
    ("qwen3_vl", SETTINGS, {"do_normalize": False}, "do_normalize False"),
    ("qwen3_vl", SETTINGS, {"image_mean": "x"}, "mean is 'x'"),
    ("qwen3_vl", CONFIG, {"image_token_id": 9_999}, "placeholder_token_id is 9999"),
]


@pytest.mark.parametrize(("name", "file", "content", "words"), CHANGES)
def test_contradictory_checkpoints(written, tmp_path, name, file, content, words):
    def change(found):
        for key, value in content.items():
            found[key] = {**found[key], **value} if key == "audio_config" else value

    with pytest.raises(ExportError, match=words) as raised:
        opened(changed(written[name], tmp_path, file, change))
    assert "\n" not in str(raised.value)


MISSING = [
    ("qwen3_asr", "chat_template.jinja", "has no usable chat template"),
    (
        "paddleocr_vl",
        SETTINGS,
        "preprocessor_config.json is missing, and processor_config.json has no image_processor",
    ),
]


@pytest.mark.parametrize(("name", "file", "words"), MISSING)
def test_a_missing_file(written, tmp_path, name, file, words):
    copied = Path(shutil.copytree(written[name], tmp_path / "copied"))
    (copied / file).unlink()
    with pytest.raises(ExportError, match=words):
        opened(copied)


def test_a_context_without_room_for_a_sound(folder):
    checkpoint = opened(folder, max_context=16)
    with pytest.raises(ExportError, match="has no room for the shortest sound"):
        kind_of(checkpoint).source(checkpoint).references(None)


def test_settings_may_be_in_the_file_of_the_whole_processor(written, tmp_path):
    for name, key, change in (
        ("qwen3_asr", "feature_extractor", {"hop_length": 80}),
        ("qwen3_vl", "image_processor", {}),
    ):
        copied, before = (
            Path(shutil.copytree(written[name], tmp_path / name)),
            opened(written[name]),
        )
        settings, file = copied / SETTINGS, copied / "processor_config.json"
        content = {key: {**json.loads(settings.read_text()), **change}}
        settings.unlink()
        if not file.exists():
            assert opened(copied).given == before.given  # the defaults
            file.write_text("{}")
        file.write_text(json.dumps({**json.loads(file.read_text()), **content}))
        medium = dataclasses.replace(before.given.medium, **change)
        assert opened(copied).given == dataclasses.replace(before.given, medium=medium)


def test_pairs(written, folder, tmp_path):
    text = write_family_checkpoint("llama", tmp_path / "text")
    opened(folder, draft=text)  # a draft that reads text alone
    with pytest.raises(ExportError, match=r"its target \(family llama\) text alone; choose"):
        opened(text, draft=folder)
    other = write_qwen3_asr(tmp_path / "other", audio={"n_window_infer": 400})
    tiles = written["idefics3"]
    assert opened(tiles, tiles)
    for target, draft in ((folder, other), (tiles, written["qwen3_vl"])):
        with pytest.raises(ExportError, match="choose a draft of the same kind"):
            opened(target, draft)


def test_a_manifest_is_checked_when_a_bundle_is_opened(given_pair, tmp_path):
    manifest = json.loads((given_pair / "bundle" / MANIFEST_NAME).read_text())
    assert manifest["target"]["given"]["medium"]["kind"] == "chunked-sound"
    changes = [
        ({"width": 0}, "target: given: width is 0"),
        ({"levels": 9}, "target: given: levels is 9"),
        ({"lacks": "x"}, "lacks 'x', which this version of dsbd-ort does not know"),
        ({"medium": {"kind": "smell"}}, "kind 'smell', which this version"),
        ({"medium": None}, "medium is None"),
    ]
    for change, words in changes:
        given = {**manifest["target"]["given"], **change}
        file = tmp_path / MANIFEST_NAME
        file.write_text(json.dumps({**manifest, "target": {**manifest["target"], "given": given}}))
        with pytest.raises(BundleError, match=words):
            manifest_from_file(file)


def test_another_graph_than_the_manifest_says_is_refused(given_pair):
    bundle = open_bundle(given_pair / "bundle")
    entry = bundle.manifest.target
    wider = dataclasses.replace(entry, given=dataclasses.replace(entry.given, width=65))
    manifest = dataclasses.replace(bundle.manifest, target=wider)
    with pytest.raises(BundleError, match=r"given_embeddings of shape"):
        load_causal_lm(dataclasses.replace(bundle, manifest=manifest), "target")


def test_a_source_of_another_kind_is_refused(given_pipe):
    request = given_pipe.request_of(RequestInputs([1, 2, 3], (1, 2)), {"max_new_tokens": 2})
    with pytest.raises(InputError, match="expected a GivenPrompt"):
        given_pipe.models.decoded([request])


def test_providers_with_a_device_refuse_the_bundle(given_pair):
    with pytest.raises(ProviderError):
        load_causal_lm(open_bundle(given_pair / "bundle"), "target", provider="cuda")
