"""Times of words are those that transformers gives for the same audio."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor, WhisperTokenizer
from transformers.models.whisper.tokenization_whisper import LANGUAGES, _collate_word_timestamps

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_ort import Pipeline
from dsbd_ort.engine import Service, ServiceClosedError
from dsbd_ort.speech.transcript import SpokenWord, Transcript
from dsbd_ort.speech.words import grouped
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.parts.source.alignment import Alignment
from scripts.speech_checkpoint import SAMPLING_RATE, TOKENS
from tests.runtime.bundle_edits import edited
from tests.speech.sounds import noise, speech_like
from tests.speech.test_transcription import FEW, NO_FALLBACK, model_of, sound, theirs

Words = list[tuple[str, float, float]]
WORDS: dict[str, Any] = {"return_timestamps": "word", **NO_FALLBACK}
FIRST_TIME = TOKENS.end + len(TOKENS.names)


def their_words(
    folder: Path, samples: NDArray[np.float32], found: Transcript, **options: Any
) -> Words:
    """The words of the segments of transformers' generate, grouped as its pipeline groups them.

    Of the segments that ``found`` has: it ends with the last window in the audio.
    """
    with quiet_libraries():
        tokenizer = WhisperTokenizer.from_pretrained(folder)
    times = {"return_timestamps": True, "return_token_timestamps": True, "temperature": 0.0}
    segments = theirs(folder, samples, with_mask=True, **times, **options)[: len(found.segments)]
    assert [tuple(each["tokens"].tolist()) for each in segments] == [
        each.token_ids for each in found.segments
    ]
    special, words, before = {*tokenizer.all_special_ids}, [], 0.0
    for segment in segments:
        texts, times = [], []
        for token, time in zip(
            segment["tokens"].tolist(), segment["token_timestamps"].tolist(), strict=True
        ):
            if token < FIRST_TIME and token not in special:
                texts.append(token)
                times.append((round(before, 2), round(time, 2)))
            before = time
        language = "english" if options.get("task") == "translate" else found.language
        name = LANGUAGES.get(str(language), language)
        made = _collate_word_timestamps(tokenizer, texts, times, name, False) if texts else []
        words += [(each["text"], *each["timestamp"]) for each in made]
    return words


def words_of(found: Transcript) -> list[SpokenWord]:
    return [word for segment in found.segments for word in segment.words or ()]


def check_equal(found: Transcript, wanted: Words) -> None:
    assert [(word.word, word.start, word.end) for word in words_of(found)] == wanted
    for segment in found.segments:
        assert segment.words is not None
        assert "".join(word.word for word in segment.words) == segment.text
    assert all(0.0 <= word.probability <= 1.0 for word in words_of(found))


SHORT = [(1, sound(1.0)), (3, sound(1.0, seed=2)), (1, noise(0.63)), (2, speech_like(0.75, 3))]


@pytest.mark.parametrize(("num_beams", "samples"), SHORT)
def test_a_window(num_beams, samples, whisper, speech_pipe):
    found = speech_pipe.transcribe(samples, num_beams=num_beams, **WORDS, **FEW)
    wanted = their_words(whisper / "target", samples, found, num_beams=num_beams, **FEW)
    check_equal(found, wanted)
    assert len({(start, end) for _, start, end in wanted}) > 2


@pytest.mark.parametrize(("num_beams", "conditions"), [(1, False), (4, True)])
def test_a_long_audio(num_beams, conditions, whisper, speech_pipe):
    samples = sound(2.73, seed=num_beams)
    options: dict[str, Any] = {"num_beams": num_beams, **FEW}
    previous = {"condition_on_previous_text": conditions}
    found = speech_pipe.transcribe(samples, **options, **previous, **WORDS)
    options["condition_on_prev_tokens"] = conditions
    check_equal(found, their_words(whisper / "target", samples, found, **options))
    assert len({segment.seek for segment in found.segments}) > 2
    plain = speech_pipe.transcribe(
        samples, num_beams=num_beams, **FEW, **previous, **{**WORDS, "return_timestamps": True}
    )
    # The last bit of a logarithm depends on how many rows were drafted, which is a matter of time.
    for segment, with_words in zip(plain.segments, found.segments, strict=True):
        assert segment.avg_logprob == pytest.approx(with_words.avg_logprob)
        assert segment == replace(with_words, words=None, avg_logprob=segment.avg_logprob)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_beams", [1, 5])
def test_twenty_audios_to_the_end_of_the_context(seed, num_beams, whisper, speech_pipe):
    samples = sound(0.8 + 0.6 * seed, seed)
    found = speech_pipe.transcribe(samples, num_beams=num_beams, **WORDS)
    check_equal(found, their_words(whisper / "target", samples, found, num_beams=num_beams))


def test_a_prompt_and_a_translation(whisper, speech_pipe):
    samples = sound(1.0, seed=6)
    with quiet_libraries():
        tokenizer = WhisperTokenizer.from_pretrained(whisper / "target")
        prompt_ids = tokenizer.get_prompt_ids(" The quick brown fox ", return_tensors="pt")
    options: dict[str, Any] = {"language": "de", "task": "translate", "num_beams": 1, **FEW}
    found = speech_pipe.transcribe(
        samples, initial_prompt="The quick brown fox", **options, **WORDS
    )
    wanted = their_words(whisper / "target", samples, found, prompt_ids=prompt_ids, **options)
    check_equal(found, wanted)


def test_a_model_of_english_alone(whisper):
    samples = sound(1.9, seed=4)
    with Pipeline.from_bundle(whisper / "english-bundle", num_threads=1) as pipe:
        found = pipe.transcribe(samples, num_beams=2, **FEW, **WORDS)
        check_equal(found, their_words(whisper / "english", samples, found, num_beams=2, **FEW))


def test_probabilities_are_those_of_transformers(whisper, speech_pipe):
    """A token's among those of texts and their end; a word's is the mean of its tokens'."""
    samples, folder = speech_like(0.75, 3), whisper / "target"
    found = speech_pipe.transcribe(samples, num_beams=2, **FEW, **WORDS)
    segments = [segment for segment in found.segments if segment.seek == 0]
    prompt = [TOKENS.of(name) for name in ("startoftranscript", found.language, "transcribe")]
    tokens = [token for segment in segments for token in segment.token_ids]
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    features = extractor(samples, sampling_rate=SAMPLING_RATE, return_tensors="pt").input_features
    with torch.no_grad():
        ids = torch.tensor([prompt + tokens])
        logits = model_of(folder)(features, decoder_input_ids=ids).logits[0, len(prompt) - 1 :]
    probs = logits[:, : TOKENS.of("startoftranscript")].double().softmax(dim=-1)
    first, shares = 0, []
    for segment in segments:
        places = [i for i, token in enumerate(segment.token_ids) if token < TOKENS.end]
        texts = [segment.token_ids[place] for place in places]
        for word in grouped(texts, speech_pipe.tokenizer.decode, has_spaces=True):
            of_word = [float(probs[first + places[i], texts[i]]) for i in word.indices]
            shares.append(sum(of_word) / len(of_word))
        first += len(segment.token_ids)
    words = [word for segment in segments for word in segment.words or ()]
    assert [word.probability for word in words] == pytest.approx(shares, rel=1e-4)
    assert len(words) >= 2


def test_requests_at_a_time_are_those_alone(speech_pipe):
    requests = [(sound(0.7 + 0.5 * seed, seed), {"num_beams": 1 + seed % 3}) for seed in range(4)]
    requests.append((requests[0][0], {"num_beams": 1}))  # the same audio twice
    alone = [
        speech_pipe.transcribe(samples, **options, **FEW, **WORDS) for samples, options in requests
    ]
    with Service(speech_pipe) as service, ThreadPoolExecutor(len(requests)) as threads:
        together = [
            threads.submit(service.transcribe, samples, **options, **FEW, **WORDS)
            for samples, options in requests
        ]
        for found, wanted in zip(together, alone, strict=True):
            assert words_of(found.result()) == words_of(wanted) != []


def test_no_call_of_a_closed_service_waits(speech_pipe):
    service = Service(speech_pipe)
    assert service._loop.call(lambda target: target.num_rows) == 0
    with pytest.raises(InputError, match="wrong"):
        service._loop.call(_fail)
    assert service._loop.call(lambda target: target.num_rows) == 0
    service.close()
    with pytest.raises(ServiceClosedError):
        service._loop.call(lambda target: target.num_rows)


def _fail(_: Any) -> int:
    raise InputError("wrong")


def test_the_graph_is_opened_when_it_is_needed(speech_bundle):
    with Pipeline.from_bundle(speech_bundle, num_threads=1) as pipe:
        aligner = pipe.models.target.part(Alignment)
        pipe.transcribe(sound(1.0), **FEW, **{**WORDS, "return_timestamps": True})
        assert aligner._engine is None
        pipe.transcribe(sound(1.0), **FEW, **WORDS)
        assert aligner._engine is not None
    assert aligner._engine is None


def without_alignment(data: dict[str, Any]) -> None:
    del data["target"]["encoder"]["speech"]["alignment"]
    del data["files"]["target/alignment.onnx"]


def without_heads(data: dict[str, Any]) -> None:
    without_alignment(data)
    data["target"]["encoder"]["speech"]["alignment_heads"] = None


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (without_alignment, "made without the graph that they need; export it again"),
        (without_heads, "names no alignment_heads; add those of the model"),
    ],
)
def test_a_bundle_without_the_graph(edit, words, speech_bundle, tmp_path):
    folder = Path(shutil.copytree(speech_bundle, tmp_path / "bundle"))
    edited(folder, edit)
    with Pipeline.from_bundle(folder, num_threads=1) as pipe:
        with pytest.raises(InputError, match=f"times of words are asked for, but .*{words}"):
            pipe.transcribe(sound(1.0), **WORDS)
        assert pipe.transcribe(sound(0.5), **FEW, **{**WORDS, "return_timestamps": True}).text
        with pytest.raises(InputError, match="the engine has no alignment graph"):
            pipe.models.target.part(Alignment).align((1,), [1], [2])


def test_a_graph_of_other_heads_is_refused(speech_bundle, tmp_path):
    folder = Path(shutil.copytree(speech_bundle, tmp_path / "bundle"))
    edited(
        folder,
        lambda data: data["target"]["encoder"]["speech"].update(alignment_heads=[[1, 0]]),
    )
    with Pipeline.from_bundle(folder, num_threads=1) as pipe:
        with pytest.raises(BundleError, match="alignment_weights"):
            pipe.transcribe(sound(0.5), **FEW, **WORDS)


def test_the_manifest_says_how_far_the_weights_are(speech_bundle):
    content = json.loads((speech_bundle / "dsbd.json").read_text())
    alignment = content["target"]["encoder"]["speech"]["alignment"]
    assert alignment["median_filter_width"] == 7
    assert alignment["max_abs_error"] < 1e-5
    assert content["draft"]["encoder"]["speech"]["alignment"] is None
    assert "draft/alignment.onnx" not in content["files"]
