"""Exports and pairs of models with given rows that are refused, each with its reason."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.given_prompt.checkpoint import GivenCheckpoint
from dsbd_export.opening import check_pair, kind_of, open_pair
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.bundle_files.manifest import MANIFEST_NAME, manifest_from_file
from dsbd_runtime.errors import BundleError, InputError, ProviderError
from dsbd_runtime.loading import load_causal_lm
from scripts.family_checkpoints import write_family_checkpoint
from scripts.qwen3_asr_checkpoint import write_qwen3_asr


def opened(folder, draft=None, **options):
    config = ExportConfig(
        target=str(folder), draft=draft and str(draft), output=folder / "bundle", **options
    )
    target, of_draft = open_pair(config)
    check_pair(target, of_draft, config)
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_qwen3_asr(tmp_path_factory.mktemp("qwen3-asr") / "target")


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


def changed(folder, tmp_path, name, change):
    """Return a copy of the checkpoint with other content of one of its files; no weights."""
    copy = tmp_path / "changed"
    copy.mkdir()
    for file in [*folder.glob("*.json"), *folder.glob("*.jinja")]:
        (copy / file.name).write_bytes(file.read_bytes())
    content = json.loads((copy / name).read_text())
    change(content)
    (copy / name).write_text(json.dumps(content))
    return copy


ALIGNER = "Qwen3ASRForTokenClassification"
CHANGES = [
    ("config.json", lambda c: c.update(thinker_config={}), "whose name ends in -hf"),
    ("config.json", lambda c: c.update(architectures=[ALIGNER]), "writes no text"),
    (
        "config.json",
        lambda c: c["audio_config"].update(output_dim=24),
        "returns rows of 24 numbers",
    ),
    ("config.json", lambda c: c.update(audio_token_id=9_999), "placeholder_token_id is 9999"),
    ("config.json", lambda c: c["audio_config"].update(n_window_infer=250), "window_frames is 250"),
    (
        "preprocessor_config.json",
        lambda c: c.update(feature_size=80),
        "80 mels, its encoder reads 16",
    ),
    ("preprocessor_config.json", lambda c: c.update(dither=0.1), "made with noise"),
    ("preprocessor_config.json", lambda c: c.update(hop_length=0), "hop_length is 0"),
    ("preprocessor_config.json", lambda c: c.update(hop_length="x"), "hop_length is 'x'"),
]


@pytest.mark.parametrize(("name", "change", "words"), CHANGES)
def test_contradictory_checkpoints(folder, tmp_path, name, change, words):
    with pytest.raises(ExportError, match=words):
        opened(changed(folder, tmp_path, name, change))


def test_a_checkpoint_without_chat_template(folder, tmp_path):
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    (copied / "chat_template.jinja").unlink()
    with pytest.raises(ExportError, match="has no usable chat template"):
        opened(copied)


def test_a_context_without_room_for_a_sound(folder):
    checkpoint = opened(folder, max_context=16)
    with pytest.raises(ExportError, match="has no room for the shortest sound"):
        kind_of(checkpoint).source(checkpoint).references(None)


def test_settings_in_processor_config_json_are_read_too(folder, tmp_path):
    copy = changed(folder, tmp_path, "preprocessor_config.json", lambda c: None)
    settings = json.loads((copy / "preprocessor_config.json").read_text())
    (copy / "preprocessor_config.json").unlink()
    assert opened(copy).given == opened(folder).given  # the defaults
    settings = {"feature_extractor": {**settings, "hop_length": 80}}
    (copy / "processor_config.json").write_text(json.dumps(settings))
    assert opened(copy).given.medium.hop_length == 80


def test_pairs(folder, tmp_path):
    text = write_family_checkpoint("llama", tmp_path / "text")
    opened(folder, draft=text)  # a draft that reads text alone
    with pytest.raises(ExportError, match=r"its target \(family llama\) text alone; choose"):
        opened(text, draft=folder)
    other = write_qwen3_asr(tmp_path / "other", audio={"n_window_infer": 400})
    with pytest.raises(ExportError, match="choose a draft of the same kind"):
        opened(folder, draft=other)


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
    from dsbd_ort.requests.prompts import RequestInputs

    request = given_pipe.request_of(RequestInputs([1, 2, 3], (1, 2)), {"max_new_tokens": 2})
    with pytest.raises(InputError, match="expected a GivenPrompt"):
        given_pipe.models.decoded([request])


def test_providers_with_a_device_refuse_the_bundle(given_pair):
    with pytest.raises(ProviderError):
        load_causal_lm(open_bundle(given_pair / "bundle"), "target", provider="cuda")
