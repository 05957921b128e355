"""Transcripts are what transformers' generate makes of the same audio, drafted or not."""

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    GenerationMixin,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_ort import Pipeline
from dsbd_ort.audio.audio_files import read_samples
from dsbd_ort.decoding import DecodeResult, DecodingRequest, result_of
from dsbd_ort.speech.languages import LANGUAGE_NAMES, OTHER_NAMES, code_of
from dsbd_ort.speech.speech_request import read_language
from dsbd_ort.speech.transcribing import align_of, transcription
from dsbd_ort.speech.transcript import Segment, Transcript
from dsbd_ort.speech.transcription import answered
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.source.sources import Sources
from scripts.speech_checkpoint import SAMPLING_RATE, TOKENS, generation_config
from tests.speech.audio_files import wav_bytes

PLAIN = {"compression_ratio_threshold": None, "logprob_threshold": None}
NO_FALLBACK: dict[str, Any] = {**PLAIN, "no_speech_threshold": None, "temperature": 0.0}
FEW = {"max_new_tokens": 14}


def sound(seconds: float, seed: int = 0) -> NDArray[np.float32]:
    """A wavering tone with pauses and noise."""
    rng = np.random.default_rng(seed)
    time = np.arange(int(seconds * SAMPLING_RATE)) / SAMPLING_RATE
    tone = 0.3 * np.sin(
        2 * np.pi * (100 + 300 * rng.random()) * time * (1 + 0.3 * np.sin(3 * time))
    )
    noise = 0.05 * rng.standard_normal(len(time))
    return ((tone + noise) * (np.sin(2 * time + seed) > -0.5)).astype(np.float32)


@functools.cache
def model_of(folder: Path) -> Any:
    with quiet_libraries():
        return WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def theirs(
    folder: Path, samples: NDArray[np.float32], *, with_mask: bool = False, **options: Any
) -> list[dict[str, Any]]:
    """The segments of transformers' generate; times of tokens need the mask."""
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    features = extractor(
        samples,
        sampling_rate=SAMPLING_RATE,
        return_tensors="pt",
        truncation=False,
        padding="max_length" if len(samples) <= SAMPLING_RATE else "longest",
        return_attention_mask=with_mask,
    )
    options = {"task": "transcribe", **options}
    if with_mask:
        options["attention_mask"] = features.attention_mask
    if "english" in folder.name:
        del options["task"]
    with quiet_libraries(), torch.no_grad():
        output = model_of(folder).generate(features.input_features, return_segments=True, **options)
    segments: list[dict[str, Any]] = output["segments"][0]
    return segments


def check_equal(found: Transcript, wanted: list[dict[str, Any]], *, has_times: bool = True) -> None:
    """Hold segments against transformers'; ours end with the last window in the audio.

    Where no times are asked for, ours have those of their window, a second of audio: theirs have
    what the tokens happen to be.
    """
    known = wanted[: len(found.segments)]
    assert all(float(each["start"]) >= found.duration for each in wanted[len(known) :])
    assert [segment.token_ids for segment in found.segments] == [
        tuple(each["tokens"].tolist()) for each in known
    ]
    times = [(float(each["start"]), float(each["end"])) for each in known]
    if not has_times:
        times = [(segment.seek / 100, 1.0) for segment in found.segments]
    assert [(segment.start, segment.end) for segment in found.segments] == times


def check_windows(
    pipe: Pipeline,
    whisper: Path,
    samples: NDArray[np.float32],
    both: dict[str, Any],
    ours: dict[str, Any] | None = None,
    only_theirs: dict[str, Any] | None = None,
) -> Transcript:
    """Compare segments and times; options are those of both, ours alone, transformers' alone."""
    found = pipe.transcribe(samples, **{**NO_FALLBACK, **both, **(ours or {})})
    wanted = {"return_timestamps": True, "temperature": 0.0, **both, **(only_theirs or {})}
    check_equal(found, theirs(whisper / "target", samples, **wanted))
    return found


def conditioned(conditions: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our name of the option, and transformers'."""
    return {"condition_on_previous_text": conditions}, {"condition_on_prev_tokens": conditions}


SHORT = [(beams, times) for beams in (1, 5) for times in (False, True)]
LONG = [(1, False), (1, True), (5, True)]


@pytest.mark.parametrize(("num_beams", "times"), SHORT)
def test_a_window_with_and_without_times(num_beams, times, whisper, speech_pipe):
    samples = sound(1.0, seed=num_beams)
    options = {"num_beams": num_beams, "return_timestamps": times, **FEW}
    found = speech_pipe.transcribe(samples, **options, **NO_FALLBACK)
    check_equal(found, theirs(whisper / "target", samples, **options), has_times=times)
    if times:
        assert found.segments[0].token_ids[0] >= TOKENS.end + len(TOKENS.names)
    with quiet_libraries():
        tokenizer = WhisperTokenizer.from_pretrained(whisper / "target")
        tokens = [token for segment in found.segments for token in segment.token_ids]
        assert found.text == tokenizer.decode(tokens, skip_special_tokens=True).strip()


@pytest.mark.parametrize(("num_beams", "conditions"), LONG)
def test_a_long_audio(num_beams, conditions, whisper, speech_pipe):
    both = {"num_beams": num_beams, **FEW}
    found = check_windows(speech_pipe, whisper, sound(2.7), both, *conditioned(conditions))
    assert len({segment.seek for segment in found.segments}) > 2


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_beams", [1, 5])
def test_twenty_audios_to_the_end_of_the_context(seed, num_beams, whisper, speech_pipe):
    samples, both = sound(0.8 + 0.6 * seed, seed), {"num_beams": num_beams}
    both["return_timestamps"] = True
    for conditions in (False, True):
        check_windows(speech_pipe, whisper, samples, both, *conditioned(conditions))


@pytest.mark.parametrize("num_beams", [1, 5])
def test_how_sure_a_window_is(num_beams, whisper, speech_pipe):
    samples, model = sound(1.0), model_of(whisper / "target")
    options = {**FEW, "num_beams": num_beams, "return_timestamps": True, "temperature": 0.0}
    wanted = theirs(whisper / "target", samples, logprob_threshold=-1e9, **options)
    found = speech_pipe.transcribe(samples, **{**NO_FALLBACK, **options})
    result = wanted[0]["result"]
    tokens = result["sequences"][3:]  # after start, language and task
    if (tokens == TOKENS.end).any():
        tokens = tokens[: 1 + tokens.tolist().index(TOKENS.end)]
    logprob = float(model._retrieve_avg_logprobs(result["scores"], tokens, 0.0))
    ratio = model._retrieve_compression_ratio(tokens, TOKENS.number)
    assert found.segments[0].avg_logprob == pytest.approx(logprob, abs=1e-4)
    assert found.segments[0].compression_ratio == ratio


def test_poor_windows_are_sampled(whisper, speech_pipe):
    """At so low a temperature that what is sampled is certain, in transformers too."""
    samples = sound(2.7, seed=1)
    options = {"num_beams": 1, **FEW}
    before = speech_pipe.transcribe(samples, **options, **NO_FALLBACK)
    logprobs = sorted({segment.avg_logprob for segment in before.segments})
    threshold = (logprobs[0] + logprobs[-1]) / 2  # one is below it, and one above
    both = {**options, "logprob_threshold": threshold, "temperature": (0.0, 1e-4)}
    found = check_windows(speech_pipe, whisper, samples, both, {"strategy": "greedy"})
    temperatures = {segment.temperature for segment in found.segments}
    assert temperatures == {0.0, 1e-4}
    for segment in found.segments:
        assert (segment.avg_logprob < threshold) == (segment.temperature > 0.0)


def test_repetitions_are_sampled(speech_pipe):
    samples = sound(1.0)
    options: dict[str, Any] = {**NO_FALLBACK, **FEW, "temperature": (0.0, 0.6), "seed": 5}
    [first, *_] = speech_pipe.transcribe(samples, **options).segments
    assert first.temperature == 0.0
    options["compression_ratio_threshold"] = first.compression_ratio - 0.01
    [first, *_] = speech_pipe.transcribe(samples, **options).segments
    assert first.temperature == 0.6
    again = speech_pipe.transcribe(samples, **options).segments[0]
    assert again.token_ids == first.token_ids  # of the same seed
    others = [
        speech_pipe.transcribe(samples, **{**options, "seed": seed}).segments[0].avg_logprob
        for seed in (6, 7)
    ]
    [best, *_] = speech_pipe.transcribe(samples, best_of=3, **options).segments
    assert best.avg_logprob == pytest.approx(max(first.avg_logprob, *others))


@pytest.mark.parametrize("language", ["en", "de"])
def test_the_best_texts_of_a_window(language, whisper, speech_pipe):
    samples = sound(1.0, seed=4)
    times = range(TOKENS.of("notimestamps"), TOKENS.number)
    suppressed = [*generation_config()["suppress_tokens"], *times]
    options = {"language": language, "num_beams": 4, "num_return_sequences": 3, **FEW}
    options["suppress_tokens"] = suppressed
    found = speech_pipe.transcribe(samples, **options, **NO_FALLBACK)
    extractor = WhisperFeatureExtractor.from_pretrained(whisper / "target")
    features = extractor(samples, sampling_rate=SAMPLING_RATE, return_tensors="pt").input_features
    begin = [TOKENS.of(name) for name in ("startoftranscript", language, "transcribe")]
    begin.append(TOKENS.of("notimestamps"))
    # Whisper's own ``generate`` returns the best text for each of several.
    del options["language"]
    with quiet_libraries(), torch.no_grad():
        wanted = GenerationMixin.generate(
            model_of(whisper / "target"),
            features,
            decoder_input_ids=torch.tensor([begin]),
            begin_suppress_tokens=generation_config()["begin_suppress_tokens"],
            **options,
        )
    texts = [row[len(begin) :] for row in wanted.tolist()]
    without = [[token for token in row if token != TOKENS.end] for row in texts]
    assert len({*map(tuple, without)}) == 3
    assert [list(each.token_ids) for each in found.alternatives] == without
    assert found.alternatives[0].token_ids == found.segments[0].token_ids
    assert {each.seek for each in found.alternatives} == {0}


def test_the_best_of_several_samples(speech_pipe):
    options = {**NO_FALLBACK, **FEW, "temperature": 0.8, "seed": 5, "best_of": 4}
    found = speech_pipe.transcribe(sound(1.0), num_return_sequences=3, **options).alternatives
    rated = [each.avg_logprob for each in found]
    assert len(found) == 3 and rated == sorted(rated, reverse=True)
    assert not speech_pipe.transcribe(sound(1.0), **options).alternatives


def test_windows_of_silence_are_skipped(whisper, speech_pipe):
    samples = sound(2.7, seed=2)
    options = {"num_beams": 1, **FEW}
    before = speech_pipe.transcribe(samples, **options, **NO_FALLBACK)
    probs = sorted({segment.no_speech_prob for segment in before.segments})
    for threshold in (0.0, (probs[0] + probs[-1]) / 2):
        skipping = {"logprob_threshold": 0.0, "no_speech_threshold": threshold}
        found = check_windows(speech_pipe, whisper, samples, {**options, **skipping})
        assert len(found.segments) < len(before.segments)
        seeks = {segment.seek for segment in found.segments}
        assert found.skipped and not seeks & {each.seek for each in found.skipped}
        for each in found.skipped:
            assert each.no_speech_prob > threshold and each.avg_logprob < 0.0
            assert (each.start, each.temperature) == (each.seek / 100, 0.0)
            assert each.start < each.end <= found.duration
    assert found.segments


@pytest.mark.parametrize("conditions", [False, True])
def test_an_initial_prompt(conditions, whisper, speech_pipe):
    text = " The quick brown fox "
    with quiet_libraries():
        tokenizer = WhisperTokenizer.from_pretrained(whisper / "target")
        prompt_ids = tokenizer.get_prompt_ids(text, return_tensors="pt")
    ours, wanted = conditioned(conditions)
    ours["initial_prompt"], wanted["prompt_ids"] = text, prompt_ids
    both = {"num_beams": 1, **FEW}
    check_windows(speech_pipe, whisper, sound(1.9, seed=3), both, ours, wanted)


def test_languages_and_tasks(whisper, speech_pipe):
    samples = sound(1.0)
    options = {"num_beams": 1, **FEW}
    detected = speech_pipe.transcribe(samples, **options, **NO_FALLBACK)
    assert detected.language in ("en", "de", "fr")
    assert 1 / 3 <= detected.language_probability <= 1
    for language, task in (("german", "translate"), ("<|fr|>", "transcribe"), ("EN", "translate")):
        found = speech_pipe.transcribe(
            samples, language=language, task=task, **options, **NO_FALLBACK
        )
        code = {"german": "de", "<|fr|>": "fr", "EN": "en"}[language]
        assert (found.language, found.language_probability, found.task) == (code, None, task)
        wanted = theirs(whisper / "target", samples, language=code, task=task, **options)
        check_equal(found, wanted)


def test_a_model_of_english_alone(whisper):
    samples = sound(2.2, seed=4)
    with Pipeline.from_bundle(whisper / "english-bundle", num_threads=1) as pipe:
        found = pipe.transcribe(samples, num_beams=2, **FEW, **NO_FALLBACK)
        options = {"num_beams": 2, "return_timestamps": True, "temperature": 0.0, **FEW}
        check_equal(found, theirs(whisper / "english", samples, **options))
        assert (found.language, found.language_probability) == ("en", None)
        for wrong, words in (
            ({"task": "translate"}, "task is 'translate', but the model supports only English"),
            ({"language": "de"}, "language is 'de', but the model supports only English"),
        ):
            with pytest.raises(InputError, match=words):
                pipe.transcribe(samples, **wrong)


def test_drafted_is_plain(speech_pipe):
    samples = sound(1.6, seed=5)
    texts, sure = {}, {}
    for name, options in {
        "plain": {"strategy": "beam-search"},
        "model": {"strategy": "speculative-beam-search", "draft_length": 3},
        "ngram": {"drafter": "ngram", "draft_length": 3},
        "default": {},
    }.items():
        found = speech_pipe.transcribe(samples, num_beams=3, **options, **FEW, **NO_FALLBACK)
        texts[name] = [(segment.token_ids, segment.start) for segment in found.segments]
        sure[name] = [segment.avg_logprob for segment in found.segments]
        if name != "default":  # which drafts where it pays: times decide
            assert (found.stats.num_draft_tokens > 0) == (name != "plain")
    assert texts["model"] == texts["ngram"] == texts["default"] == texts["plain"]
    for of_drafts in sure.values():
        assert of_drafts == pytest.approx(sure["plain"], abs=1e-4)


class CountedEngine:
    """An encoder's engine that counts its calls."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.calls = 0

    def run_with_ort_values(self, *arguments: Any) -> Any:
        self.calls += 1
        return self._engine.run_with_ort_values(*arguments)


def test_the_encoder_runs_once_a_window(whisper):
    with Pipeline.from_bundle(whisper / "english-bundle", num_threads=1) as pipe:
        encoder = pipe.models.target.part(Sources).encoder
        encoder._engine = counted = CountedEngine(encoder._engine)
        options: dict[str, Any] = {**NO_FALLBACK, **FEW, "logprob_threshold": 0.0}
        options["temperature"] = (0.0, 0.1, 0.2)
        found = pipe.transcribe(sound(1.9), num_beams=2, return_timestamps=True, **options)
        seeks = {segment.seek for segment in found.segments}
        assert {segment.temperature for segment in found.segments} == {0.2}
        assert counted.calls == len(seeks) > 1


def test_a_window_is_held_between_its_requests(whisper):
    """Also until the times of its words are known, if caches are emptied; not after its end."""
    with Pipeline.from_bundle(whisper / "english-bundle", num_threads=1) as pipe:
        encoder = pipe.models.target.part(Sources).encoder
        encoder._engine = counted = CountedEngine(encoder._engine)

        def empty_caches() -> None:  # as where the requests of all audios end together
            with pipe.models.engines():
                pass

        def decoded(requests: Sequence[DecodingRequest]) -> list[DecodeResult]:
            results = [result_of(pipe.models.iterations(request)) for request in requests]
            empty_caches()
            return results

        options = {**NO_FALLBACK, **FEW, "num_beams": 2, "return_timestamps": "word"}
        found = answered(
            transcription(pipe, sound(1.9), options).steps(None, align_of(pipe)), decoded
        )
        assert counted.calls == len({segment.seek for segment in found.segments}) > 1
        empty_caches()
        assert encoder.num_bytes == 0

        def failing(requests: Sequence[DecodingRequest]) -> list[DecodeResult]:
            decoded(requests)
            raise RuntimeError("enough")

        steps = transcription(pipe, sound(1.0), options).steps(None, align_of(pipe))
        with pytest.raises(RuntimeError, match="enough"):
            answered(steps, failing)
        empty_caches()
        assert encoder.num_bytes == 0


def test_segments_are_told_as_they_are_known(speech_pipe):
    told: list[Segment] = []
    options = {"num_beams": 1, "on_segment": told.append, **FEW, **NO_FALLBACK}
    found = speech_pipe.transcribe(sound(2.2), **options)
    assert tuple(told) == found.segments
    assert [segment.id for segment in told] == list(range(len(told)))
    assert found.duration == pytest.approx(2.2)
    assert found.stats.num_output_tokens > 0


def test_samples_that_cannot_change_are_not_copied(speech_pipe):
    speech = speech_pipe.prompts.encoder.speech
    samples = sound(1.0)
    copied = read_samples(samples, speech.sampling_rate)
    assert copied is not samples and not np.shares_memory(copied, samples)
    samples.flags.writeable = False
    assert np.shares_memory(read_samples(samples, speech.sampling_rate), samples)
    of_file = read_samples(wav_bytes(samples), speech.sampling_rate)
    assert np.shares_memory(read_samples(of_file, speech.sampling_rate), of_file)
    assert read_samples(samples.astype(np.float64), speech.sampling_rate).dtype == np.float32


def test_the_names_of_languages_are_transformers():
    from transformers.models.whisper import tokenization_whisper as tokens

    assert tokens.LANGUAGES == LANGUAGE_NAMES
    names = {name: code for code, name in LANGUAGE_NAMES.items()}
    assert tokens.TO_LANGUAGE_CODE == {**names, **OTHER_NAMES}


def test_languages_by_tags_of_regions_and_detected_by_name(speech_pipe):
    speech = speech_pipe.prompts.encoder.speech
    several = replace(speech, languages={"en": 1, "zh": 2, "haw": 3, "jw": 4, "no": 5})
    names = {"en-US": "en", "en_gb": "en", "zh-CN": "zh", "zh-Hant-TW": "zh", "HAW-us": "haw"}
    names |= {"jv-ID": "jw", "nb-NO": "no", " en ": "en", "auto": None, "Auto": None}
    for name, code in names.items():
        assert read_language(name, several) == code
    for name in ("de-AT", "english-US", "en US", "-en", "auto-US"):
        with pytest.raises(InputError, match=f"language is '{name}'"):
            read_language(name, several)
    fixed = replace(several, language="zh")  # of the checkpoint's generation_config.json
    assert [read_language(name, fixed) for name in (None, "auto")] == ["zh", None]
    english = replace(speech, languages=None, tasks=None)
    assert [read_language(name, english) for name in (None, "auto", "en-GB")] == ["en"] * 3
    with pytest.raises(InputError, match="'de-AT', but the model supports only English"):
        read_language("de-AT", english)


def test_the_default_of_a_checkpoint_is_a_language(whisper, speech_pipe):
    speech = speech_pipe.prompts.encoder.speech
    assert code_of("German", speech) == "de"
    content = json.loads((whisper / "bundle" / "dsbd.json").read_text())
    assert content["target"]["encoder"]["speech"]["language"] is None
