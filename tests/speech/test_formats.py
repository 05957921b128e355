"""Transcripts in every format, byte for byte."""

import json
import math
from dataclasses import replace

import pytest

from dsbd_ort.speech.formats import FORMATS, remarks, transcript_object
from dsbd_ort.speech.transcript import Skipped, SpokenWord
from tests.speech.fakes import transcript

SRT = """\
1
00:00:00,000 --> 00:00:02,500
And so, my fellow Americans,

2
00:00:02,500 --> 00:00:07,040
ask not what <your> country -> can & do

3
01:00:00,000 --> 01:02:03,045
for you.
"""
VTT = """\
WEBVTT

00:00:00.000 --> 00:00:02.500
And so, my fellow Americans,

00:00:02.500 --> 00:00:07.040
ask not what &lt;your&gt; country --&gt; can &amp; do

01:00:00.000 --> 01:02:03.045
for you.
"""
TEXT = "And so, my fellow Americans, ask not\n\nwhat <your> country --> can & do   for you."


@pytest.mark.parametrize(("name", "wanted"), [("txt", TEXT), ("srt", SRT), ("vtt", VTT)])
def test_texts(name: str, wanted: str) -> None:
    assert FORMATS[name](transcript()) == wanted


def test_json() -> None:
    assert json.loads(FORMATS["json"](transcript())) == {
        "text": TEXT,
        "usage": {"type": "duration", "seconds": 11.0},
    }


def test_words() -> None:
    (first, second, *others) = transcript().segments
    words = (
        SpokenWord(word=" And", start=0.0, end=0.5, probability=0.75),
        SpokenWord(word=" so,", start=0.5, end=1.02, probability=0.25),
    )
    made = transcript()
    segments = (replace(first, words=words), replace(second, words=()), *others)
    made = replace(made, segments=segments)
    fields = json.loads(FORMATS["verbose_json"](made))
    assert fields["words"] == [
        {"word": "And", "start": 0.0, "end": 0.5, "probability": 0.75},
        {"word": "so,", "start": 0.5, "end": 1.02, "probability": 0.25},
    ]
    assert all("words" not in segment for segment in fields["segments"])
    [one, other, *rest] = transcript_object(made, "a.wav")["segments"]
    assert [word["word"] for word in one["words"]] == [" And", " so,"]
    assert other["words"] == () and "words" not in rest[0]
    assert FORMATS["srt"](made) == SRT


def test_verbose_json() -> None:
    fields = json.loads(FORMATS["verbose_json"](transcript()))
    assert list(fields) == "task language duration text segments usage dsbd".split()
    assert fields["segments"][0] == {
        "id": 0,
        "seek": 0,
        "start": 0.0,
        "end": 2.5,
        "text": " And so, my fellow Americans,",
        "tokens": [50_364, 400, 50_365],
        "temperature": 0.0,
        "avg_logprob": -0.25,
        "compression_ratio": 1.5,
        "no_speech_prob": 0.01,
    }
    assert fields["dsbd"]["language_probability"] == 0.75
    assert fields["dsbd"]["stats"]["num_output_tokens"] == 4


def test_numbers_that_json_lacks() -> None:
    silent = transcript(segments=[], language_probability=math.nan)
    assert json.loads(FORMATS["verbose_json"](silent))["dsbd"]["language_probability"] is None


@pytest.mark.parametrize(("name", "wanted"), [("txt", ""), ("srt", ""), ("vtt", "WEBVTT\n")])
def test_nothing_is_said(name: str, wanted: str) -> None:
    assert FORMATS[name](transcript(segments=[])) == wanted


def test_what_commands_print() -> None:
    fields = transcript_object(transcript(), "a.wav")
    assert (fields["version"], fields["audio"]) == (1, "a.wav")
    assert fields["segments"][1]["token_ids"] == (50_364, 401, 50_365)


def test_times_are_rounded_to_milliseconds() -> None:
    made = transcript(segments=[(-1e-9, 59.9994, "a"), (59.9994, 59.9996, "b")])
    assert "00:00:00,000 --> 00:00:59,999" in FORMATS["srt"](made)
    assert "00:00:59,999 --> 00:01:00,000" in FORMATS["srt"](made)


def skipped(start: float, no_speech_prob: float, avg_logprob: float) -> Skipped:
    return Skipped(
        seek=round(100 * start),
        start=start,
        end=start + 30.0,
        temperature=0.2,
        avg_logprob=avg_logprob,
        no_speech_prob=no_speech_prob,
    )


SKIPPED = (skipped(0.0, 0.75, -1.5), skipped(60.0, 0.9, -1.25), skipped(90.0, 0.8125, -2.0))


def test_remarks_tell_what_the_text_does_not() -> None:
    assert list(remarks(transcript())) == []
    made = transcript(language="th", language_probability=0.3, skipped=SKIPPED)
    assert list(remarks(made)) == [
        "the language was detected as th, with probability 0.30; give --language if it is another",
        "0.0 to 30.0 s skipped: no speech, with probability 0.75, and a text of mean "
        "log-probability -1.50",
        "60.0 to 120.0 s skipped: no speech, with probability 0.81 or more, and a text of mean "
        "log-probability -1.25 or less",
    ]


def test_skipped_windows_in_json() -> None:
    made = transcript(skipped=SKIPPED[:1])
    wanted = {
        "seek": 0,
        "start": 0.0,
        "end": 30.0,
        "temperature": 0.2,
        "avg_logprob": -1.5,
        "no_speech_prob": 0.75,
    }
    assert json.loads(FORMATS["verbose_json"](made))["dsbd"]["skipped"] == [wanted]
    assert transcript_object(made, "a.wav")["skipped"] == (wanted,)
    assert json.loads(FORMATS["verbose_json"](transcript()))["dsbd"]["skipped"] == []
