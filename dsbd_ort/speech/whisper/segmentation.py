"""Segments of one window: its text divided at times, and the start of the next window.

As in transformers' Whisper, two times in a row end one segment and begin the next. If a text ends
with a single time, nothing follows it in its window. If it ends with two times, or with text after
the last two, the end of the window cut it: the next window begins at the last time.

A text requested without times may still have times, in any order, and need not begin with one. It
is divided in the same way, but unlike in transformers its segments have the times of the window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsbd_runtime.parts.source.speech_entry import FRAMES_A_POSITION, SpeechEntry


@dataclass(frozen=True)
class TimedPart:
    """The tokens of one segment, and its times in seconds from the start of the audio."""

    start: float
    end: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class WindowParts:
    """The segments of a window in order, and the frames from its start to the next window."""

    parts: tuple[TimedPart, ...]
    num_frames: int


def parts_of_window(
    token_ids: Sequence[int], seek: int, num_frames: int, speech: SpeechEntry, *, has_times: bool
) -> WindowParts:
    """Return the segments of a window.

    token_ids: the new tokens, without the end token.
    seek, num_frames: first frame of the window, and number of its frames within the audio.
    has_times: whether the text was requested with times, and so follows their rules.
    """
    first = speech.first_timestamp
    seconds = FRAMES_A_POSITION * speech.seconds_per_frame  # from one time to the next
    offset = seek * seconds / FRAMES_A_POSITION
    is_time = [speech.is_time(token) for token in token_ids]
    ends_alone = is_time[-2:] == [False, True]
    ends = [i + 1 for i in range(len(is_time) - 1) if is_time[i] and is_time[i + 1]]
    # in float32 as in transformers, which may round down to one frame less
    in_seconds = np.float32(num_frames) * np.float32(speech.seconds_per_frame)
    num_positions = int(in_seconds / np.float32(seconds))
    if not ends:
        position = num_positions
        times = [token for token in token_ids if speech.is_time(token)]
        if has_times and times and times[-1] != first:
            position = times[-1] - first
        part = TimedPart(offset, offset + position * seconds, tuple(token_ids))
        return WindowParts((part,), num_frames)
    if ends_alone:
        ends.append(len(token_ids))
    else:
        ends[-1] += 1  # the last segment ends with both times: it was cut
    parts, begin = [], 0
    for end in ends:
        tokens = tuple(token_ids[begin:end])
        last = -2 if end == ends[-1] and not ends_alone else -1
        start, stop = 0, num_positions
        if has_times:
            start, stop = tokens[0] - first, tokens[last] - first
        parts.append(TimedPart(offset + start * seconds, offset + stop * seconds, tokens))
        begin = end
    if ends_alone:
        return WindowParts(tuple(parts), num_frames)
    last_time = token_ids[ends[-1] - 2] - first
    # a text requested without times may end with two times 0: then the whole window is done
    return WindowParts(tuple(parts), last_time * FRAMES_A_POSITION or num_frames)


def without_second_end(token_ids: tuple[int, ...], speech: SpeechEntry) -> tuple[int, ...]:
    """Return the tokens of a segment for use in a prompt: with only one time at its end."""
    is_cut = len(token_ids) > 2 and speech.is_time(token_ids[-2])
    return token_ids[:-1] if is_cut else token_ids
