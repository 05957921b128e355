"""Segments of a window, and the ratio of repetitions, are those of transformers."""

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration

from dsbd_ort.speech.whisper.segmentation import parts_of_window, without_second_end
from dsbd_ort.speech.window_texts import compression_ratio
from dsbd_runtime.parts.source.speech_entry import SpeechEntry

FIRST = 1000
SPEECH = SpeechEntry(
    sampling_rate=16_000,
    num_mels=80,
    n_fft=400,
    hop_length=160,
    chunk_seconds=30,
    num_frames=3000,
    no_timestamps_token_id=FIRST - 1,
    previous_token_id=0,
    no_speech_token_id=FIRST - 2,
    suppress_tokens=[],
    begin_suppress_tokens=[],
)
LITERAL = [  # (tokens as letters and times, segments as first and last time, frames to the next)
    ([0, "a", 50], [(10.0, 11.0)], 1000),  # one time at the end: nothing follows
    ([0, "a", 50, 50, "b", 90], [(10.0, 11.0), (11.0, 11.8)], 1000),
    ([0, "a", 50, 50], [(10.0, 11.0)], 100),  # two: cut, go on at the last
    ([0, "a", 50, 50, "b"], [(10.0, 11.0)], 100),  # what is after is read again
    ([0, "a"], [(10.0, 20.0)], 1000),
    ([5, "a"], [(10.0, 10.1)], 1000),
    (["a", "b"], [(10.0, 20.0)], 1000),
    ([], [(10.0, 20.0)], 1000),
    ([0, 0, "a"], [(10.0, 10.0)], 1000),  # without an end in sight: the next window
]


def ids(content: list[int | str]) -> list[int]:
    return [ord(each) if isinstance(each, str) else FIRST + each for each in content]


@pytest.mark.parametrize(("content", "times", "num_frames"), LITERAL)
def test_times_divide_a_window(content, times, num_frames):
    found = parts_of_window(ids(content), 1000, 1000, SPEECH, has_times=True)
    assert [(round(part.start, 6), round(part.end, 6)) for part in found.parts] == times
    assert found.num_frames == num_frames


WITHOUT = [  # texts that have times all the same: in any order, texts in front, no end
    ["a", 50, 50, "b"],
    [90, "a", 50, 50, "b", 20],
    [90, 50, 20],
    [5, "a", 2],
    [0, 0],
    ["a"],
]


@pytest.mark.parametrize("content", WITHOUT)
def test_a_text_without_times_has_those_of_its_window(content):
    found = parts_of_window(ids(content), 1000, 600, SPEECH, has_times=False)
    divided = parts_of_window(ids(content), 1000, 600, SPEECH, has_times=True)
    assert [part.token_ids for part in found.parts] == [part.token_ids for part in divided.parts]
    assert {(part.start, part.end) for part in found.parts} == {(10.0, 16.0)}
    assert found.num_frames == divided.num_frames


def test_segments_are_those_of_transformers():
    rng = np.random.default_rng(0)
    num_several = 0
    for _ in range(300):
        length, seek, num_frames = (int(rng.integers(1, high)) for high in (12, 5000, 3000))
        is_time = rng.random(length) < 0.5
        times = FIRST + np.sort(rng.integers(1, 1500, length))
        tokens = np.where(is_time, times, rng.integers(0, 900, length))
        wanted, offset = WhisperForConditionalGeneration._retrieve_segment(
            seek_sequence=torch.from_numpy(tokens),
            seek_outputs=[None],
            time_offset=torch.tensor([seek], dtype=torch.float64) * 0.02 / 2,
            timestamp_begin=FIRST,
            seek_num_frames=torch.tensor([num_frames]),
            time_precision=0.02,
            time_precision_features=0.01,
            input_stride=2,
            prev_idx=0,
            idx=0,
            return_token_timestamps=False,
            decoder_input_ids=torch.zeros(1, 4),
        )
        found = parts_of_window(tokens.tolist(), seek, num_frames, SPEECH, has_times=True)
        assert found.num_frames == int(offset)
        assert [part.token_ids for part in found.parts] == [
            tuple(each["tokens"].tolist()) for each in wanted
        ]
        for part, theirs in zip(found.parts, wanted, strict=True):
            assert (part.start, part.end) == (float(theirs["start"]), float(theirs["end"]))
        num_several += len(wanted) > 1
    assert num_several > 50


def test_ratios_are_those_of_transformers():
    rng = np.random.default_rng(0)
    for vocab_size in (300, 51_865):
        for period in (1, 3, 40):
            tokens = np.tile(rng.integers(0, 300, period), 40)[:60]
            wanted = WhisperForConditionalGeneration._retrieve_compression_ratio(
                torch.from_numpy(tokens), vocab_size
            )
            assert compression_ratio(tokens.tolist(), vocab_size) == wanted


def test_what_was_said_before_ends_with_one_time():
    assert without_second_end((FIRST, 1, FIRST + 5, FIRST + 5), SPEECH) == (FIRST, 1, FIRST + 5)
    assert without_second_end((FIRST, 1, FIRST + 5), SPEECH) == (FIRST, 1, FIRST + 5)
    assert without_second_end((FIRST, FIRST), SPEECH) == (FIRST, FIRST)
    assert without_second_end((FIRST, WORD, WORD), SPEECH) == (FIRST, WORD, WORD)


WORD = FIRST + 1501  # the first token after the times of a window


def test_tokens_after_the_times_are_text():
    assert [SPEECH.is_time(token) for token in (FIRST - 1, FIRST, WORD - 1, WORD)] == [
        *(False, True, True, False)
    ]
    for tokens, has_times in (((5, WORD, WORD, 6), False), ((FIRST, WORD, WORD, 6), True)):
        found = parts_of_window(tokens, 0, 3000, SPEECH, has_times=has_times)
        [part] = found.parts
        assert (part.start, part.end, part.token_ids) == (0.0, 30.0, tokens)
        assert found.num_frames == 3000
