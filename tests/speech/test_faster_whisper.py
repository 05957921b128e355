"""faster-whisper's API over a tiny bundle: records, laziness and options, and what is refused."""

import dataclasses

import numpy as np
import pytest

from dsbd_ort.speech.faster_whisper import (
    BatchedInferencePipeline,
    Segment,
    TranscriptionInfo,
    TranscriptionOptions,
    VadOptions,
    WhisperModel,
    Word,
)
from dsbd_runtime.errors import InputError
from tests.speech.sounds import RATE, speech_like

FIELDS = {  # of faster-whisper 1.2.1
    Word: "start end word probability",
    Segment: "id seek start end text tokens avg_logprob compression_ratio no_speech_prob words "
    "temperature",
    TranscriptionInfo: "language language_probability duration duration_after_vad "
    "all_language_probs transcription_options vad_options",
    VadOptions: "threshold neg_threshold min_speech_duration_ms max_speech_duration_s "
    "min_silence_duration_ms speech_pad_ms",
    TranscriptionOptions: "beam_size best_of patience length_penalty repetition_penalty "
    "no_repeat_ngram_size log_prob_threshold no_speech_threshold compression_ratio_threshold "
    "condition_on_previous_text prompt_reset_on_temperature temperatures initial_prompt prefix "
    "suppress_blank suppress_tokens without_timestamps max_initial_timestamp word_timestamps "
    "prepend_punctuations append_punctuations multilingual max_new_tokens clip_timestamps "
    "hallucination_silence_threshold hotwords",
}
# a random model has no idea of speech
QUICK = {
    **{"beam_size": 2, "temperature": 0.0, "max_new_tokens": 10, "language": "en"},
    **{"no_speech_threshold": None, "log_prob_threshold": None},
}


@pytest.fixture(scope="module")
def model(speech_bundle):
    opened = WhisperModel(speech_bundle, device="cpu", cpu_threads=1, local_files_only=True)
    yield opened
    opened.close()


@pytest.mark.parametrize("record", FIELDS)
def test_fields(record):
    assert [field.name for field in dataclasses.fields(record)] == FIELDS[record].split()


def tokens_of(found):
    return [segment.tokens for segment in found[0]]


def test_a_window_is_that_of_the_pipeline(model, speech_pipe):
    """With the same settings; without the second of the times at the end of a segment."""
    samples = speech_like(1.0, 3)
    quick = {**QUICK, "beam_size": 1, "max_initial_timestamp": 0.2}
    segments, info = model.transcribe(samples, **quick)
    found = next(segments)
    wanted = speech_pipe.transcribe(
        samples,
        **{"num_beams": 1, "temperature": 0.0, "max_new_tokens": 10, "language": "en"},
        **{"no_speech_threshold": None, "logprob_threshold": None, "return_timestamps": True},
    ).segments[0]
    assert (found.text, tuple(found.tokens)) == (wanted.text, wanted.token_ids[: len(found.tokens)])
    assert (found.id, found.seek, found.temperature) == (1, 0, 0.0)
    assert found.avg_logprob == pytest.approx(wanted.avg_logprob, abs=1e-5)
    assert (info.language, info.language_probability, info.duration) == ("en", 1.0, 1.0)
    assert info.transcription_options.beam_size == 1 and info.vad_options is None


def test_segments_are_decoded_as_they_are_read(model):
    segments, _ = model.transcribe(speech_like(3.0), word_timestamps=True, **QUICK)
    assert iter(segments) is segments
    first = next(segments)
    assert first.words and first.start == first.words[0].start and first.end == first.words[-1].end
    assert first._asdict()["words"][0]["word"] == first.words[0].word
    starts = [first.start, *(segment.start for segment in segments)]
    assert len(starts) > 2 and starts == sorted(starts)


def test_text_before(model):
    """Hot words, and the text of windows before, are read; a hot temperature ends the latter."""
    samples = speech_like(2.5)
    alone = tokens_of(model.transcribe(samples, condition_on_previous_text=False, **QUICK))
    assert tokens_of(model.transcribe(samples, **QUICK)) != alone
    reset = {**QUICK, "prompt_reset_on_temperature": -1.0}
    assert tokens_of(model.transcribe(samples, **reset)) == alone
    assert tokens_of(model.transcribe(samples, hotwords="brown fox", **reset))[0] != alone[0]
    prompted = tokens_of(model.transcribe(samples, initial_prompt="brown fox", **reset))
    assert prompted[0] != alone[0]


def test_prefix_and_clips(model):
    samples = speech_like(2.5)
    segments, _ = model.transcribe(samples, prefix="brown fox", **QUICK)
    assert "".join(segment.text for segment in segments).startswith(" brown fox")
    segments, info = model.transcribe(samples, clip_timestamps="0.5,1.0,2.0", **QUICK)
    assert {segment.seek for segment in segments} <= {50, *range(51, 100), *range(200, 250)}
    assert info.transcription_options.clip_timestamps == "0.5,1.0,2.0"


def test_the_best_of_poor_texts(model):
    poor = {**QUICK, "temperature": [0.0, 0.5], "compression_ratio_threshold": 0.0}
    texts = [segment for segment in model.transcribe(speech_like(1.0), **poor)[0]]
    assert {segment.temperature for segment in texts} == {0.5}


def test_batches(model):
    """Parts of an audio are decoded together as alone, whatever the size of a batch."""
    samples = speech_like(3.0, 3)
    clips = [{"start": 0.0, "end": 0.8}, {"start": 1.0, "end": 2.0}, {"start": 2.2, "end": 3.0}]
    batched = BatchedInferencePipeline(model)
    quick = {name: value for name, value in QUICK.items() if "threshold" not in name}
    found = [
        [*batched.transcribe(samples, clip_timestamps=clips, batch_size=size, **quick)[0]]
        for size in (1, 2, 8)
    ]
    tokens = [[segment.tokens for segment in segments] for segments in found]
    assert tokens[0] == tokens[1] == tokens[2]
    assert [(each.start, each.end) for each in found[0]] == [tuple(each.values()) for each in clips]
    for clip, segment in zip(clips, found[0], strict=True):
        part = samples[int(clip["start"] * RATE) : int(clip["end"] * RATE)]
        if len(part) < RATE:
            alone, _ = batched.transcribe(part, vad_filter=False, **quick)
            assert [each.tokens for each in alone] == [segment.tokens]
    with pytest.raises(InputError, match="the audio has 3 s; expected less than 1, or vad_filter"):
        batched.transcribe(samples, vad_filter=False)


def test_languages(model):
    assert model.supported_languages == ["en", "de", "fr"] and model.model.is_multilingual
    language, probability, every = model.detect_language(speech_like(3.0))
    assert (language, probability) == every[0] and sum(dict(every).values()) == pytest.approx(1.0)
    voted = model.detect_language(
        speech_like(3.0), language_detection_segments=3, language_detection_threshold=1.0
    )
    assert voted[0] in ("en", "de", "fr") and 0.0 < voted[1] < 1.0
    options = {**QUICK, "language": None, "multilingual": True}
    segments, info = model.transcribe(speech_like(3.0), **options)
    assert (info.language, info.all_language_probs) == (language, every)
    assert tokens_of((segments, info)) != tokens_of(model.transcribe(speech_like(3.0), **QUICK))


def test_empty_audio(model):
    nothing = np.zeros(0, np.float32)
    assert [*model.transcribe(nothing)[0]] == []
    assert [*BatchedInferencePipeline(model).transcribe(nothing, vad_filter=False)[0]] == []


REFUSED = [
    ({"patience": 2}, "patience is 2; expected 1, because a search ends"),
    ({"hallucination_silence_threshold": 2.0}, "hallucination_silence_threshold is 2.0"),
    ({"append_punctuations": "!"}, "append_punctuations is '!'; expected"),
    ({"chunk_length": 15}, "chunk_length is 15; expected 1, the seconds"),
    ({"temperature": []}, "temperature has 0 values"),
    ({"beam_sise": 3}, "unknown option 'beam_sise'; did you mean 'beam_size'"),
    ({"language": "xx"}, "language is 'xx'; expected the code"),
    ({"task": "sing"}, "task is 'sing'; expected one of transcribe"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_refused(model, options, words):
    with pytest.raises(InputError, match=words) as raised:
        model.transcribe(speech_like(0.5), **options)
    assert "\n" not in str(raised.value)


def test_audio_that_is_refused(model):
    with pytest.raises(InputError, match=r"audio has the shape \(2, 9\); expected samples of"):
        model.transcribe(np.zeros((2, 9), np.float32))


def test_models_that_are_refused(speech_bundle, tiny_bundle):
    with pytest.raises(InputError, match="base is not a folder; expected a bundle"):
        WhisperModel("base")
    with pytest.raises(InputError, match="compute_type is 'int8'; expected one of default, auto"):
        WhisperModel(speech_bundle, compute_type="int8")
    with pytest.raises(InputError, match="files is given, which is not supported"):
        WhisperModel(speech_bundle, files={})
    with pytest.raises(InputError, match="is not a bundle of a Whisper model"):
        WhisperModel(tiny_bundle.path)
