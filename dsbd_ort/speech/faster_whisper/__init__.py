"""API of faster-whisper 1.2.1 over a bundle: its classes, options, defaults and records.

| faster-whisper | here |
|---|---|
| device, device_index; cpu_threads | provider; num_threads |
| beam_size; patience 1 | num_beams; early_stopping |
| best_of, length_penalty, repetition_penalty, no_repeat_ngram_size, max_new_tokens | the same |
| suppress_tokens, suppress_blank | suppress_tokens, begin_suppress_tokens |
| without_timestamps, max_initial_timestamp | no_timestamps_token_id, max_initial_timestamp_index |
| temperature, the three thresholds | ``windows.RankedTexts``, which chooses a window's text |
| prefix | a logits processor |
| initial_prompt, hotwords | the text before a window, see ``windows.RankedTranscription`` |
| condition_on_previous_text, prompt_reset_on_temperature | the same |
| clip_timestamps, multilingual, language_detection_(threshold, segments) | there too |
| word_timestamps | the alignment graph |
| vad_filter, vad_parameters | ``voice_activity.speech_parts`` |
| batch_size | windows of a ``BatchedDecoder``, which share engine calls |
| log_progress, num_workers, download_root, local_files_only, revision, use_auth_token | ignored |

Any other option is refused by name; see ``records`` and ``WhisperModel``.
"""

from dsbd_ort.audio.voice_activity import VadOptions
from dsbd_ort.speech.faster_whisper.model import (
    BatchedInferencePipeline,
    WhisperModel,
    decode_audio,
)
from dsbd_ort.speech.faster_whisper.records import TranscribedSegment as Segment
from dsbd_ort.speech.faster_whisper.records import TranscriptionInfo, TranscriptionOptions, Word

__all__ = [
    "BatchedInferencePipeline",
    "Segment",
    "TranscriptionInfo",
    "TranscriptionOptions",
    "VadOptions",
    "WhisperModel",
    "Word",
    "decode_audio",
]
