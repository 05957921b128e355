"""Transcripts as text: plain, JSON, and subtitles as SubRip (SRT) or WebVTT."""

import dataclasses
import html
from collections.abc import Callable, Iterator
from typing import Any

from dsbd_ort.requests.results import JSON_VERSION, json_text
from dsbd_ort.speech.transcript import Segment, Skipped, Transcript

UNCERTAIN = 0.5  # probability of a detected language below which ``remarks`` name it

WITH_TIMES = ("srt", "vtt", "verbose_json")
"""Formats with times: a request for one of them implies timestamps."""


def as_text(transcript: Transcript) -> str:
    """Return the text without the space that it begins with."""
    return transcript.text.strip()


def as_json(transcript: Transcript) -> str:
    """Return the text and the duration in OpenAI's JSON."""
    return json_text({"text": as_text(transcript), "usage": usage(transcript)})


def as_verbose_json(transcript: Transcript) -> str:
    """Return OpenAI's JSON with segments, requested words, and statistics in the field ``dsbd``."""
    segments = transcript.segments
    words = [
        {**dataclasses.asdict(word), "word": word.word.strip()}  # without a space, as OpenAI does
        for segment in segments
        for word in segment.words or ()
    ]
    alternatives = [dataclasses.asdict(each) for each in transcript.alternatives]
    has_words = any(segment.words is not None for segment in segments)
    fields = {
        "task": transcript.task,
        "language": transcript.language,
        "duration": round(transcript.duration, 3),
        "text": as_text(transcript),
        **({"words": words} if has_words else {}),
        "segments": [_segment_fields(segment) for segment in segments],
        "usage": usage(transcript),
        "dsbd": {
            "language_probability": transcript.language_probability,
            "stats": dataclasses.asdict(transcript.stats),
            "skipped": [dataclasses.asdict(window) for window in transcript.skipped],
            **({"alternatives": alternatives} if alternatives else {}),
        },
    }
    return json_text(fields)


def as_srt(transcript: Transcript) -> str:
    """Return subtitles as SubRip: numbered, hours:minutes:seconds,milliseconds."""
    cues = [
        f"{number}\n{_clock(segment.start, ',')} --> {_clock(segment.end, ',')}\n"
        f"{text.replace('-->', '->')}\n"
        for number, (segment, text) in enumerate(_cues(transcript), 1)
    ]
    return "\n".join(cues)


def as_vtt(transcript: Transcript) -> str:
    """Return subtitles as WebVTT; the text is escaped as its cues require."""
    cues = [
        f"{_clock(segment.start, '.')} --> {_clock(segment.end, '.')}\n"
        f"{html.escape(text, quote=False)}\n"
        for segment, text in _cues(transcript)
    ]
    return "\n".join(["WEBVTT\n", *cues])


FORMATS: dict[str, Callable[[Transcript], str]] = {
    "txt": as_text,
    "json": as_json,
    "verbose_json": as_verbose_json,
    "srt": as_srt,
    "vtt": as_vtt,
}
"""Functions that write a transcript, by format; the format is the suffix of files (or .json)."""


def remarks(transcript: Transcript) -> Iterator[str]:
    """Yield sentences on skipped windows and an uncertain language."""
    probability = transcript.language_probability
    if probability is not None and probability < UNCERTAIN:
        yield (
            f"the language was detected as {transcript.language}, with probability "
            f"{probability:.2f}; give --language if it is another"
        )
    gap: list[Skipped] = []
    for window in transcript.skipped:
        if gap and window.start > gap[-1].end:
            yield _remark_on(gap)
            gap = []
        gap.append(window)
    if gap:
        yield _remark_on(gap)


def _remark_on(gap: list[Skipped]) -> str:
    silence = min(window.no_speech_prob for window in gap)
    logprob = max(window.avg_logprob for window in gap)
    several = len(gap) > 1
    return (
        f"{gap[0].start:.1f} to {gap[-1].end:.1f} s skipped: no speech, with probability "
        f"{silence:.2f}{' or more' * several}, and a text of mean log-probability {logprob:.2f}"
        f"{' or less' * several}"
    )


def usage(transcript: Transcript) -> dict[str, Any]:
    """Return OpenAI's ``usage`` of an audio."""
    return {"type": "duration", "seconds": round(transcript.duration, 3)}


def transcript_object(transcript: Transcript, audio: str) -> dict[str, Any]:
    """Return the fields of a transcript as commands print them; ``audio``: its file."""
    fields = dataclasses.asdict(transcript)
    for segment in fields["segments"]:
        if segment["words"] is None:  # not requested
            del segment["words"]
    return {"text": transcript.text, "audio": audio, **fields, "version": JSON_VERSION}


def _segment_fields(segment: Segment) -> dict[str, Any]:
    fields = dataclasses.asdict(segment)
    fields["tokens"] = list(fields.pop("token_ids"))
    del fields["words"]  # the words of all segments are in one list
    return fields


def _cues(transcript: Transcript) -> Iterator[tuple[Segment, str]]:
    """Yield the segments that have text, and their texts on one line (an empty line ends a cue)."""
    for segment in transcript.segments:
        if text := " ".join(segment.text.split()):
            yield segment, text


def _clock(seconds: float, mark: str) -> str:
    """Return a time such as 01:02:03,456 with the decimal mark ``mark``."""
    whole, milliseconds = divmod(round(max(seconds, 0.0) * 1000), 1000)
    minutes, whole = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{whole:02d}{mark}{milliseconds:03d}"
