"""Windows of sound that a draft of a speech model learns from, and the encoder's output for them.

A window is kept as a prompt of two numbers: its number, and that of its audio's first window, from
which the language is detected.

Features and the encoder's output are kept in 16 bits. Computing them again would take longer than
training on them.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.modeling_outputs import BaseModelOutput

from dsbd_distill.config import DistillConfig
from dsbd_distill.sources import SourceRowReader
from dsbd_distill.teacher import Rows
from dsbd_distill.work_folder import keep_array, read_array
from dsbd_errors import DsbdError
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_export.given_prompt.checkpoint import GivenCheckpoint
from dsbd_export.texts import TextFile, opened_sinks
from dsbd_forward.forward import Source
from dsbd_runtime.bundle_files.durable_files import put_in_place
from dsbd_runtime.parts.source.speech_entry import Features, SoundFeatures, SpeechEntry

Hear = Callable[[Path, SpeechEntry], Iterator[Features]]
"""Yields the windows of an audio file, each (num_mels, num_frames) float32; raises InputError."""

T = TypeVar("T")

_SOURCE = 2  # numbers that a prompt consists of
MOST_KEPT_BYTES = 2**33  # size of hidden states: 46 hours for Whisper base
_ENCODED_TOGETHER = 8
_SHARE_WITH_TIMES = 0.5
_NEVER = -1e4  # a logit whose probability is 0, in 16 bits too


def write_windows(
    files: Iterable[TextFile], hear: Hear, speech: SpeechEntry, features: Path, folder: Path
) -> None:
    """Write features of all windows, then their prompts; raise ExportError for non-audio files."""
    partial, firsts = features.with_suffix(".partial"), dict[Path, int]()
    with opened_sinks(folder) as sink_of:
        with partial.open("wb") as written:
            heard = all_heard(files, lambda path: hear(path, speech))
            for number, (file, window) in enumerate(heard):
                written.write(window.astype(np.float16).tobytes())
                first = firsts.setdefault(file.path, number)
                sink_of(file.name).write_prompt([number, first])
        put_in_place(partial, features)


def all_heard(
    files: Iterable[TextFile], hear: Callable[[Path], Iterator[T]]
) -> Iterator[tuple[TextFile, T]]:
    """Yield pairs of a file and an item that ``hear`` yields for it; a file may have several items.

    Raise ExportError after the last file if some cannot be read as audio.
    """
    wrong: list[DsbdError] = []
    num_files = 0
    for file in files:
        num_files += 1
        try:
            for each in hear(file.path):
                yield file, each
        except DsbdError as error:
            wrong.append(error)
    if wrong:
        raise ExportError(
            f"{len(wrong)} of {num_files} files of data cannot be heard, the first: {wrong[0]}; "
            "choose others by a pattern, or exclude them"
        )


def open_windows(features: Path, speech: SpeechEntry) -> NDArray[np.float16]:
    """Return the features of all windows, (num_windows, num_mels, num_frames), memory-mapped."""
    shape = (-1, speech.num_mels, speech.num_frames)
    return np.memmap(features, np.float16, "r").reshape(shape)


def check_spoken(config: DistillConfig, checkpoint: Checkpoint) -> None:
    """Raise ExportError for a language or a task that the target does not support.

    For models that read sound in prompts, both are checked when prompts are made.
    """
    if isinstance(checkpoint, GivenCheckpoint):
        return
    speech = None if checkpoint.encoder is None else checkpoint.encoder.speech
    supported_by_option = {
        "language": None if speech is None else speech.languages,
        "task": None if speech is None else speech.tasks,
    }
    for name, supported in supported_by_option.items():
        value = getattr(config, name)
        if value is None or (supported is not None and value in supported):
            continue
        if supported is None:
            what = "reads no sound" if speech is None else "is of English alone"
            raise ExportError(
                f"{name}={value!r} has no meaning for the target (family {checkpoint.family}), "
                f"which {what}; leave it out"
            )
        shown = ", ".join(list(supported)[:6])
        raise ExportError(
            f"{name}={value!r} is not known to the target at {checkpoint.folder}; use one of its "
            f"{len(supported)}, such as {shown}"
        )


class SoundSources(SourceRowReader):
    """Sources that are windows of sound."""

    spread = 1  # sources with times begin with one token less
    answers_a_round = 64  # encoding a window is slow

    def __init__(
        self,
        target: Any,
        checkpoint: Checkpoint,
        features: NDArray[np.float16],
        kept: Path,
        config: DistillConfig,
    ) -> None:
        assert checkpoint.encoder is not None and checkpoint.encoder.speech is not None
        super().__init__(target, 2 if checkpoint.encoder.speech.languages is None else 4)
        self._speech = speech = checkpoint.encoder.speech
        self._start = checkpoint.encoder.start_token_id
        self._settings = GenerationConfig.from_pretrained(str(checkpoint.folder))
        self._features = features
        self._kept = kept
        kept.mkdir(exist_ok=True)
        self._width = int(target.config.hidden_size)
        self._num_kept = MOST_KEPT_BYTES // (2 * speech.num_positions * self._width)
        self._language = config.language or speech.language
        self._task = config.task or "transcribe"
        self._language_of: dict[int, int] = {}

    def begun(self, prompts: Rows, seed: int) -> list[NDArray[np.integer]]:
        """See SourceRowReader; a random half of the answers has timestamps."""
        have_times = np.random.default_rng(seed).random(len(prompts)) < _SHARE_WITH_TIMES
        return [
            np.array([*prompt, *self._begin(int(prompt[1]), bool(has_times))], np.int64)
            for prompt, has_times in zip(prompts, have_times, strict=True)
        ]

    def parted(self, row: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ids = np.asarray(row, np.int64)
        return ids[:_SOURCE], ids[_SOURCE:]

    def begins(self, first_labels: Tensor) -> Tensor:
        return torch.full_like(first_labels, _SOURCE)

    @torch.no_grad()
    def hidden_states(self, sources: Tensor, is_source: Tensor) -> tuple[Tensor, Tensor | None]:
        """See SourceRowReader; without a mask, as all positions of a window are valid."""
        device = sources.device
        return self._hidden(sources[:, 0].tolist()).to(device), None

    @torch.no_grad()
    def ruled(self, logits: Tensor, targets: Tensor, num_begin: int) -> Tensor:
        """See SourceRowReader; suppresses tokens and applies transformers' rules of timestamps."""
        speech, scores = self._speech, logits[:, -1].clone()
        scores[:, speech.suppress_tokens] = _NEVER
        if targets.shape[1] == num_begin:
            scores[:, speech.begin_suppress_tokens] = _NEVER
        if int(targets[0, num_begin - 1]) != speech.no_timestamps_token_id:
            rules = WhisperTimeStampLogitsProcessor(self._settings, begin_index=num_begin)
            scores = rules(targets, scores)
        return scores.clamp_min(_NEVER)[:, None]

    def num_rows(self, length: int) -> int:
        return length + self._speech.num_positions

    def request_of(self, row: NDArray[np.integer]) -> tuple[Source, list[int]]:
        source, begin = self.parted(row)
        return SoundFeatures(self._features[source[0]].astype(np.float32)), begin.tolist()

    def _begin(self, first_window: int, has_times: bool) -> list[int]:
        speech, tokens = self._speech, [self._start]
        if speech.languages is not None and speech.tasks is not None:
            tokens += [self._language_token(first_window), speech.tasks[self._task]]
        return tokens if has_times else [*tokens, speech.no_timestamps_token_id]

    @torch.no_grad()
    def _language_token(self, first_window: int) -> int:
        """Return the token of the language of an audio, detected as requests do."""
        languages = self._speech.languages
        assert languages is not None  # the caller has checked
        if self._language is not None:
            return languages[self._language]
        if first_window not in self._language_of:
            device = next(self._target.parameters()).device
            hidden = self._hidden([first_window]).to(device)
            logits = self._target(
                encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
                decoder_input_ids=torch.tensor([[self._start]], device=device),
                use_cache=False,
            ).logits[0, -1]
            tokens = [*languages.values()]
            self._language_of[first_window] = tokens[int(logits[tokens].argmax())]
        return self._language_of[first_window]

    def _hidden(self, windows: list[int]) -> Tensor:
        """Return the encoder's output for windows, (B, N, W) float32."""
        kept = {window for window in windows if self._file(window).exists()}
        states_by_window = {window: read_array(self._file(window)) for window in kept}
        missing = [window for window in dict.fromkeys(windows) if window not in kept]
        device = next(self._target.parameters()).device
        for begin in range(0, len(missing), _ENCODED_TOGETHER):
            part = missing[begin : begin + _ENCODED_TOGETHER]
            features = torch.from_numpy(self._features[part].astype(np.float32)).to(device)
            with torch.autocast(
                device.type, enabled=False
            ):  # the kept states serve exact measurements too
                hidden = self._target.get_encoder()(features).last_hidden_state
            for window, states in zip(part, hidden.float().cpu().numpy(), strict=True):
                states_by_window[window] = self._keep(window, states.astype(np.float16))
        return torch.from_numpy(np.stack([states_by_window[window] for window in windows])).float()

    def _file(self, window: int) -> Path:
        return self._kept / f"{window:07d}.npy"

    def _keep(self, window: int, states: NDArray[np.float16]) -> NDArray[np.float16]:
        """Keep the hidden states of a window if there is room for them, and return them."""
        if window < self._num_kept:
            keep_array(self._file(window), states)
        return states
