"""Folders of CTranslate2 as checkpoints: weights, settings, tokens; what is refused, in one line.

``ctranslate2_folders`` writes them; test_ctranslate2_itself.py compares with the package.
"""

import contextlib
import gc
import json
import random
import shutil
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from transformers import MarianTokenizer

import dsbd_ort
from dsbd_export import locating
from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ExportConfig
from dsbd_export.encoder_decoder.checkpoint import with_languages
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_pair
from scripts.speech_checkpoint import TOKENS
from tests.encoder_decoder_pair import LANGUAGES
from tests.export.conftest import edit_json, opened, written_tokenizer
from tests.export.ctranslate2_folders import (
    COPIED,
    DECODER,
    KINDS,
    TRANSFORMER,
    WHISPER,
    arrays_of,
    checkpoint_of,
    file_bytes,
    model_of,
    write_argos,
    write_folder,
)
from tests.export.test_marian_tokenizer import SOURCES
from tests.exports import export_quietly
from tests.made_once import made_once

ERRORS = {"float32": 0, "float16": 5e-4, "bfloat16": 4e-3, "int8": 4e-3, "int16": 6e-4}
"""Of the largest value of a weight."""

IN_CI = ("float32", "int8")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    def make(folder: Path) -> dict[str, Path]:
        return {family: checkpoint_of(family, folder / family) for family in COPIED}

    return made_once(tmp_path_factory, "ctranslate2", make)


@pytest.fixture
def write(checkpoints, tmp_path):
    def written(family: str, kind: str = "float32", **changes: Any) -> Path:
        return write_folder(checkpoints[family], tmp_path / family, kind, **changes)

    return written


def refusal(folder: Path) -> str:
    with pytest.raises(ExportError) as caught:
        load_model(opened(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "kind",
    [kind if kind in IN_CI else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS],
)
@pytest.mark.parametrize("family", COPIED)
def test_weights_are_those_of_the_checkpoint(family, kind, write, checkpoints):
    lines: list[str] = []
    folder = write(family, kind)
    found = load_model(opened(folder), report=lines.append).state_dict()
    assert f"({kind}{', dequantized' if kind.startswith('int') else ''})" in lines[0]
    wanted = model_of(checkpoints[family]).state_dict()
    positions = {name for name in found if name.endswith("embed_positions.weight")}
    assert set(found) - set(wanted) <= {*positions, "final_logits_bias"}
    for name, weight in wanted.items():
        limit = ERRORS[kind] * float(weight.abs().max())
        torch.testing.assert_close(found[name], weight, atol=limit, rtol=0)


def test_positions_that_m2m100_computes_are_weights(write, checkpoints):
    found = load_model(opened(write("m2m_100"))).model.encoder.embed_positions.weight
    wanted = model_of(checkpoints["m2m_100"]).model.encoder.embed_positions
    torch.testing.assert_close(found, wanted.weights[wanted.offset :], atol=0, rtol=0)


@pytest.mark.parametrize(("family", "name"), [("marian", "lm_head"), ("whisper", "proj_out")])
def test_a_head_of_its_own_is_not_that_of_the_embeddings(family, name, write, checkpoints):
    own = arrays_of(model_of(checkpoints[family]))["decoder/projection/weight"] * 2
    model = load_model(opened(write(family, **{"decoder/projection/weight": own})))
    found = getattr(model, name).weight[: len(own)].detach().numpy()
    np.testing.assert_array_equal(found, own)
    assert not np.array_equal(model.get_decoder().embed_tokens.weight.detach()[: len(own)], own)


def test_settings_of_whisper_are_those_of_its_checkpoint(write, checkpoints):
    found, wanted = opened(write("whisper")), opened(checkpoints["whisper"])
    of_family = {"max_initial_timestamp_index": 50}  # no folder of CTranslate2 says it
    assert vars(found.encoder.speech) == vars(wanted.encoder.speech) | of_family
    for name in ("vocab_size", "context_length", "bos_token_id", "eos_token_ids", "layer_masks"):
        assert getattr(found, name) == getattr(wanted, name), name


def test_files_of_the_checkpoint_are_used_as_they_are(write, checkpoints):
    folder = write("whisper")
    name = "generation_config.json"
    (folder / name).write_bytes((checkpoints["whisper"] / name).read_bytes())
    found = opened(folder)
    assert found.encoder.speech == opened(checkpoints["whisper"]).encoder.speech
    assert "defaults in place of tokenizer_config.json" in found.ctranslate2.description


def test_a_whisper_without_the_empty_token_is_of_english_as_in_ctranslate2(write):
    folder = write("whisper")
    for name in ("vocabulary.json", "tokenizer.json"):
        (folder / name).write_text((folder / name).read_text().replace('""', '"xx"'))
    assert opened(folder).encoder.speech.languages is None


def test_a_tokenizer_of_whisper_may_lack_times(write, tmp_path):
    folder = write("whisper")
    content = json.loads((folder / "tokenizer.json").read_text())
    first = TOKENS.number - len(TOKENS.times)
    content["added_tokens"] = [each for each in content["added_tokens"] if each["id"] < first]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer, _ = written_tokenizer(opened(folder), tmp_path / "files")
    text = "The quick brown fox"
    assert tokenizer.decode([first, *tokenizer.encode(text), first + 1]).strip() == text


def test_a_vocabulary_of_lines(write):
    folder = write("marian")
    file = folder / "shared_vocabulary.json"
    (folder / "shared_vocabulary.txt").write_text("\n".join(json.loads(file.read_text())) + "\n")
    file.unlink()
    assert opened(folder).vocab_size == 1 + len(
        (folder / "shared_vocabulary.txt").read_text().split()
    )


def test_languages_are_tokens_of_the_tokenizer(write):
    assert with_languages(opened(write("m2m_100"))).encoder.languages == LANGUAGES


@pytest.mark.parametrize("family", COPIED)
def test_all_files_of_a_folder_are_downloaded_by_its_hub_id(family, write):
    patterns = [*locating._HUB_FILES, *locating._HUB_OLD_WEIGHTS]
    for file in write(family).iterdir():
        assert any(fnmatch(file.name, pattern) for pattern in patterns), file.name


def test_its_own_files_are_deleted_with_the_checkpoint(write):
    checkpoint = opened(write("marian"))
    folder = checkpoint.folder
    assert (folder / "vocab.json").is_file()
    del checkpoint
    gc.collect()
    assert not folder.parent.exists()


@pytest.mark.long
def test_a_translation_is_that_of_transformers(write, checkpoints, tmp_path, captures):
    folder = write("marian", "int8")
    bundle = export_quietly(captures, tmp_path / "bundle", folder)
    with quiet_libraries():
        tokenizer = MarianTokenizer.from_pretrained(checkpoints["marian"])
    model = load_model(opened(folder))  # dequantized
    options = {"max_new_tokens": 12, "bad_words_ids": [[model.config.pad_token_id]]}
    with dsbd_ort.Pipeline.from_bundle(bundle, num_threads=1) as pipe:
        for num_beams in (1, 4):
            for text in SOURCES:
                inputs = tokenizer(text, return_tensors="pt")
                with torch.no_grad():
                    wanted = model.generate(**inputs, **options, num_beams=num_beams)[0].tolist()
                found = pipe.translate(text, num_beams=num_beams, max_new_tokens=12).sequences[0]
                assert found.token_ids == wanted[1:]
        assert pipe.translate(SOURCES[0]).stats.num_output_tokens <= 512


@pytest.mark.parametrize("is_older", [False, True])
def test_a_package_of_argos_reads_as_sentencepiece(is_older, tmp_path):
    package = write_argos(tmp_path, is_older=is_older)
    unpacked = tmp_path / "translate-en_de-1_0"
    tokens = (unpacked / "model" / "shared_vocabulary.txt").read_text().split()
    splitter = sentencepiece.SentencePieceProcessor(str(unpacked / "sentencepiece.model"))
    for place in (package, unpacked):
        checkpoint, _ = open_pair(ExportConfig(target=str(place), output=tmp_path / "bundle"))
        assert checkpoint.encoder.start_token_id == tokens.index("<s>")
        assert checkpoint.eos_token_ids == [tokens.index("</s>")]
        tokenizer, _ = written_tokenizer(checkpoint, tmp_path / f"files-{place.suffix}")
        for text in (*SOURCES, "a 日本 of x"):
            pieces = splitter.encode(text, out_type=str)
            wanted = [tokens.index(piece) if piece in tokens else 0 for piece in pieces]
            assert tokenizer.encode(text) == wanted
        assert tokenizer.decode(tokenizer.encode(SOURCES[0])) == SOURCES[0]
    load_model(checkpoint)


def test_a_package_that_is_none_is_refused(tmp_path):
    package = write_argos(tmp_path).rename(tmp_path / "refused-package.argosmodel")
    whole = package.read_bytes()
    for content in (whole[:1000], b""):
        package.write_bytes(content)
        assert "is no package of Argos" in refusal_of_package(package)
    place = tmp_path / "translate-en_de-1_0"
    (place / "model" / "model.bin").unlink()
    shutil.make_archive(str(tmp_path / "other"), "zip", tmp_path, place.name)
    (tmp_path / "other.zip").rename(package)
    assert "has no model/model.bin of CTranslate2" in refusal_of_package(package)


def refusal_of_package(package: Path) -> str:
    with pytest.raises(ExportError) as caught:
        open_pair(ExportConfig(target=str(package), output=package.parent / "bundle"))
    assert not list(Path(tempfile.gettempdir()).glob(f"dsbd-*/{package.stem}"))
    return str(caught.value)


def test_a_cut_file_is_refused(write):
    file = write("marian") / "model.bin"
    whole = file.read_bytes()
    for size in (0, 3, 5, 20, 40, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert "is cut or damaged" in refusal(file.parent), size


SPECIFICATIONS = [
    ({"specification": DECODER}, "has revision 8 of CTranslate2's TransformerDecoderSpec, Whisper"),
    ({"specification": "Wav2Vec2Spec"}, "revision 3 of CTranslate2's Wav2Vec2Spec, WhisperSpec"),
    ({"specification": WHISPER, "revision": 4}, "has revision 4 of CTranslate2's WhisperSpec"),
    ({"specification": TRANSFORMER, "version": 7}, "has version 7 of CTranslate2's format, 4 to 6"),
]


def test_damaged_bytes_are_refused_in_one_line(write):
    """Of the header; weights are numbers of any kind."""
    folder = write("marian")
    whole = (folder / "model.bin").read_bytes()
    rng = random.Random(0)
    for _ in range(40):
        damaged = bytearray(whole)
        for place in (rng.randrange(4, 90), rng.randrange(len(whole))):
            damaged[place] = rng.randrange(256)
        (folder / "model.bin").write_bytes(damaged)
        with contextlib.suppress(ExportError):
            load_model(opened(folder))


@pytest.mark.parametrize(("options", "words"), SPECIFICATIONS)
def test_other_specifications_are_refused_by_name(options, words, write):
    folder = write("marian")
    (folder / "model.bin").write_bytes(file_bytes(arrays={}, **options))
    said = refusal(folder)
    assert words in said and "export the transformers checkpoint" in said


LAYER = "encoder/layer_0/self_attention"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({f"{LAYER}/relative_position_keys": np.ones((3, 8), np.float32)}, "relative_position_keys"),
    ({f"{LAYER}/linear_1/bias": None}, "lacks 1 weights, the first is model.encoder.layers.0"),
    ({"decoder/position_encodings/encodings": None}, "lacks decoder/position_encodings/encodings"),
    ({"decoder/layernorm_embedding/gamma": np.ones(32, np.float32)}, "decoder/layernorm_embedding"),
    ({"decoder/layer_norm/gamma": np.ones(32, np.float32)}, "has other norms"),
    ({"decoder/activation": np.int8(5)}, "another activation"),
    ({"decoder/scale_embeddings": np.float32(3.0)}, "multiplies embeddings by 3.0"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_other_layers_are_refused_by_name(changes, words, write):
    assert words in refusal(write("marian", **changes))


FILES = [
    ("whisper", "vocabulary.json", "lacks vocabulary.json, and vocabulary.txt"),
    ("whisper", "tokenizer.json", "lacks tokenizer.json; copy it there"),
    ("marian", "shared_vocabulary.json", "separate vocabularies of sources and targets"),
    ("marian", "target.spm", "lacks tokenizer.json, or source.spm and target.spm"),
]


@pytest.mark.parametrize(("family", "name", "words"), FILES)
def test_a_missing_file_is_named(family, name, words, write):
    folder = write(family)
    (folder / name).unlink()
    assert words in refusal(folder)


def test_a_tokenizer_or_vocabulary_of_another_model_is_refused(write):
    folder = write("m2m_100")
    file = folder / "shared_vocabulary.json"
    tokens = json.loads(file.read_text())
    file.write_text(json.dumps([*tokens[:5], "other", *tokens[6:]]))
    assert f"token 5 is {tokens[5]!r} in" in refusal(folder)
    file.write_text(json.dumps(tokens[:-1]))
    assert f"has {len(tokens) - 1} tokens, model.bin {len(tokens)}" in refusal(folder)
    file.write_text(json.dumps(tokens))
    edit_json(folder / "config.json", decoder_start_token="other")
    file.write_text("[")
    assert "cannot be read: JSONDecodeError" in refusal(folder)
    file.write_text(json.dumps(tokens))
    assert "names 'other', which the vocabulary lacks" in refusal(folder)
    edit_json(folder / "config.json", decoder_start_token=tokens[0], layer_norm_epsilon=1e-6)
    assert "has layer_norm_epsilon 1e-06, expected 1e-5" in refusal(folder)
