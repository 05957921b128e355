"""Folders of CTranslate2's converter: exported, they give the tokens of CTranslate2 itself.

The package is no dependency: pip install --target FOLDER --no-deps ctranslate2; then
PYTHONPATH=$PYTHONPATH:FOLDER pytest -m long tests/export/test_ctranslate2_itself.py
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from transformers import WhisperFeatureExtractor

import dsbd_ort
from dsbd_export.checkpoints.checkpoint import quiet_libraries
from scripts.speech_checkpoint import SAMPLING_RATE, TOKENS
from tests.encoder_decoder_pair import LANGUAGES
from tests.export.ctranslate2_folders import (
    COPIED,
    KINDS,
    checkpoint_of,
    model_of,
    vocabulary_of,
    write_argos,
    write_folder,
)
from tests.export.test_marian_tokenizer import SOURCES
from tests.exports import export_quietly
from tests.speech.sounds import speech_like

pytestmark = pytest.mark.long
ctranslate2 = pytest.importorskip("ctranslate2")

FAMILIES = tuple(COPIED)
NUM_BEAMS = (1, 4)
NEW_TOKENS = 12


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    return checkpoint_of(request.param, tmp_path_factory.mktemp("checkpoint") / request.param)


@pytest.fixture(scope="module", params=KINDS)
def folder(request, checkpoint, tmp_path_factory):
    kind = {"int8": "int8_float32"}.get(request.param, request.param)
    folder = tmp_path_factory.mktemp("converted") / f"{checkpoint.name}-{request.param}"
    files = list(COPIED[checkpoint.name])
    with quiet_libraries():
        converter = ctranslate2.converters.TransformersConverter(str(checkpoint), copy_files=files)
        converter.convert(str(folder), quantization=kind)
    return folder


def test_folders_that_tests_write_are_those_of_the_converter(folder, checkpoint, tmp_path):
    written = write_folder(checkpoint, tmp_path / "written", folder.name.rpartition("-")[2])
    for file in folder.iterdir():
        assert (written / file.name).read_bytes() == file.read_bytes(), file.name


def test_tokens_are_those_of_ctranslate2(folder, checkpoint, captures, tmp_path):
    bundle = export_quietly(captures, tmp_path / "bundle", folder)
    check = check_speech if checkpoint.name == "whisper" else check_translation
    with dsbd_ort.Pipeline.from_bundle(bundle, num_threads=1) as pipe:
        num_equal, number = check(pipe, folder, checkpoint)
    print(folder.name, num_equal, "of", number)
    assert num_equal == number


def check_speech(pipe: dsbd_ort.Pipeline, folder: Path, checkpoint: Path) -> tuple[int, int]:
    model = ctranslate2.models.Whisper(str(folder), compute_type="float32", intra_threads=1)
    assert model.is_multilingual
    extractor = WhisperFeatureExtractor.from_pretrained(checkpoint)
    names = ("startoftranscript", "en", "transcribe", "notimestamps")
    prompt = [TOKENS.of(name) for name in names]
    options: dict[str, Any] = {"temperature": 0.0, "no_speech_threshold": None}
    options |= {"compression_ratio_threshold": None, "logprob_threshold": None}
    equal = []
    for seed in range(8):
        samples = speech_like(1.0, seed)
        features = extractor(samples, sampling_rate=SAMPLING_RATE, return_tensors="np")
        view = ctranslate2.StorageView.from_array(features.input_features.astype(np.float32))
        for num_beams in NUM_BEAMS:
            [wanted] = model.generate(
                view,
                [prompt],
                beam_size=num_beams,
                length_penalty=0,
                max_length=2 * NEW_TOKENS,  # half of it is new tokens
            )
            found = pipe.transcribe(
                samples,
                language="en",
                num_beams=num_beams,
                length_penalty=0.0,
                max_new_tokens=NEW_TOKENS,
                **options,
            )
            ids = list(found.segments[0].token_ids)
            equal.append(ids == wanted.sequences_ids[0])
            if "float32" in folder.name:
                own = {"language": "en", "task": "transcribe", "num_beams": num_beams}
                own |= {"length_penalty": 0.0, "max_new_tokens": NEW_TOKENS}
                inputs = torch.from_numpy(features.input_features)
                with quiet_libraries(), torch.no_grad():
                    theirs = model_of(checkpoint).generate(inputs, **own)[0].tolist()
                assert [token for token in theirs if token < TOKENS.end] == ids
    return sum(equal), len(equal)


def check_translation(pipe: dsbd_ort.Pipeline, folder: Path, checkpoint: Path) -> tuple[int, int]:
    model = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1)
    tokens = vocabulary_of(checkpoint)
    rng = np.random.default_rng(0)
    has_languages = checkpoint.name == "m2m_100"
    end = 0
    equal = []
    for _ in range(8):
        source = [*rng.integers(5, len(tokens) - 12, rng.integers(1, 20)).tolist(), end]
        source = [LANGUAGES["eng_Latn"], *source] if has_languages else source
        prefix = ["fra_Latn"] if has_languages else []
        forced = {"forced_bos_token_id": LANGUAGES["fra_Latn"]} if has_languages else {}
        for num_beams in NUM_BEAMS:
            [wanted] = model.translate_batch(
                [[tokens[token] for token in source]],
                target_prefix=[prefix],
                beam_size=num_beams,
                length_penalty=0,
                max_decoding_length=NEW_TOKENS,
            )
            options = {"num_beams": num_beams, "length_penalty": 0.0, **forced}
            options |= {"max_new_tokens": NEW_TOKENS}
            found = pipe.generate(source=source, **options).sequences[0].token_ids
            known = [tokens.index(token) for token in wanted.hypotheses[0]]
            equal.append([token for token in found if token != end] == known)
            if "float32" in folder.name:
                inputs = torch.tensor([source])
                with quiet_libraries(), torch.no_grad():
                    theirs = model_of(checkpoint).generate(inputs, **options)[0].tolist()
                assert theirs[1:] == found
    return sum(equal), len(equal)


PACKAGES = [*((kind, False) for kind in KINDS), ("float32", True)]


@pytest.mark.parametrize(("kind", "is_older"), PACKAGES)
def test_a_package_of_argos_translates_as_in_ctranslate2(kind, is_older, captures, tmp_path):
    package = write_argos(tmp_path, kind, is_older=is_older)
    bundle = export_quietly(captures, tmp_path / "bundle", package)
    place = tmp_path / "translate-en_de-1_0"
    splitter = sentencepiece.SentencePieceProcessor(str(place / "sentencepiece.model"))
    model = ctranslate2.Translator(str(place / "model"), compute_type="float32", intra_threads=1)
    with dsbd_ort.Pipeline.from_bundle(bundle, num_threads=1) as pipe:
        for text in (*SOURCES, "a 日本 of x"):
            for num_beams in NUM_BEAMS:
                [wanted] = model.translate_batch(
                    [splitter.encode(text, out_type=str)],
                    beam_size=num_beams,
                    length_penalty=0,
                    max_decoding_length=NEW_TOKENS,
                )
                options = {"num_beams": num_beams, "length_penalty": 0.0}
                found = pipe.translate(text, max_new_tokens=NEW_TOKENS, **options).sequences[0]
                assert found.text.strip() == "".join(wanted.hypotheses[0]).replace("▁", " ").strip()
