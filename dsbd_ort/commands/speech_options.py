"""Options of dsbd-run that are about audio: what is heard, how it is written, when it is redone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dsbd_ort.commands.option_types import COUNT, PATH, FiniteRange
from dsbd_ort.commands.options import group, option
from dsbd_ort.speech.formats import WITH_TIMES
from dsbd_ort.speech.speech_request import WORD_TIMES
from dsbd_ort.speech.transcript import TASKS

SECTION = "Speech (models that read audio)"
_FORMATS = ("txt", "json", "srt", "vtt")
_TIMED = ("segment", WORD_TIMES)
_ON_STDOUT = ("txt", "json")
"""Formats of which several can stand one behind the other."""

NEEDING_AUDIO = (
    "--task",
    "--language",
    "--timestamps",
    "--initial-prompt",
    "--no-condition-on-previous-text",
    "--compression-ratio-threshold",
    "--logprob-threshold",
    "--no-speech-threshold",
    "--best-of",
    "--hot-word",
    "--hot-word-gain",
    "--output-format",
    "--output-dir",
)
NEVER_WITH_AUDIO = {
    "--prompt": "the audio is the prompt; --initial-prompt is text that came before it",
    "--prompt-file": "the audio is the prompt; --initial-prompt is text that came before it",
    "--input": "lines are texts; repeat --audio for several files",
    "--output": "use --output-dir, or redirect stdout",
    "--chat": "a speech model holds no conversation",
    "--json": "use --output-format json",
    "--trace": "an audio takes many requests, a trace draws one",
    "--workers": "use --concurrency, whose files share the engine calls",
    "--cluster": "files are transcribed on this machine",
    "--src-lang": "use --language: that of the audio",
    "--tgt-lang": "--task translate writes English, --task transcribe the language of the audio",
    "--stop": "a text ends with its window",
}
"""Options that contradict --audio, and the fix."""


@dataclass(frozen=True, kw_only=True)
class SpeechArguments:
    """How audio is transcribed, and where transcripts go.

    Attributes:
        task, language, initial_prompt, compression_ratio_threshold, logprob_threshold,
            no_speech_threshold, best_of, hot_word_gain: see ``Pipeline.transcribe``; None: its
            default.
        condition_on_previous_text: None: its default.
        hot_words: see there; empty: none.
        timestamps: "segment" or "word": whose times are wanted, whatever the format; None: none.
        output_format: see ``dsbd_ort.speech.formats``.
        output_dir: folder for one file an audio; None: stdout.
    """

    task: str | None
    language: str | None
    timestamps: str | None
    initial_prompt: str | None
    condition_on_previous_text: bool | None
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    no_speech_threshold: float | None
    best_of: int | None
    hot_words: tuple[str, ...]
    hot_word_gain: float | None
    output_format: str
    output_dir: Path | None

    def check(self, num_files: int, num_texts: int) -> None:
        """Refuse an output that cannot hold so many transcripts, or texts of a window.

        Raises:
            click.UsageError: naming the format and the fix.
        """
        if num_files > 1 and self.output_dir is None and self.output_format not in _ON_STDOUT:
            raise click.UsageError(
                f"--output-format {self.output_format} of {num_files} files is no one file; give "
                f"--output-dir, or use --output-format {' or '.join(_ON_STDOUT)}"
            )
        if num_texts > 1 and self.output_format != "json":
            raise click.UsageError(
                f"--num-return-sequences {num_texts} with --output-format {self.output_format}: "
                "the texts of a window stand in json alone; use --output-format json"
            )

    def options(self, decoding: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords of ``Pipeline.transcribe``; ``decoding``: options of a request."""
        own: dict[str, Any] = {
            "task": self.task,
            "language": self.language,
            "initial_prompt": self.initial_prompt,
            "condition_on_previous_text": self.condition_on_previous_text,
            "compression_ratio_threshold": self.compression_ratio_threshold,
            "logprob_threshold": self.logprob_threshold,
            "no_speech_threshold": self.no_speech_threshold,
            "best_of": self.best_of,
            "hot_words": list(self.hot_words) or None,
            "hot_word_gain": self.hot_word_gain,
            "return_timestamps": self._return_timestamps,
        }
        if "temperature" in decoding:
            own["temperature"] = (decoding["temperature"],)
        given = {name: value for name, value in own.items() if value is not None}
        return {**decoding, **given}

    @property
    def _return_timestamps(self) -> bool | str | None:
        """The keyword of ``Pipeline.transcribe``."""
        if self.timestamps == WORD_TIMES:
            return WORD_TIMES
        return True if self.timestamps or self.output_format in WITH_TIMES else None


def speech_options() -> Any:
    """Return a field of SpeechArguments."""
    threshold = FiniteRange(-1e6, 1e6)
    return group(
        SpeechArguments,
        section=SECTION,
        task=option(
            type=click.Choice(TASKS),
            help="Text in the language of the audio, or in English [transcribe].",
        ),
        language=option(
            metavar="CODE", help="Language of the audio, such as de [detected in its first 30 s]."
        ),
        timestamps=option(
            is_flag=False,
            flag_value=_TIMED[0],
            type=click.Choice(_TIMED),
            metavar="[segment|word]",
            help="Decode when each segment is said, as always for srt and vtt, or each word too: a "
            "line of txt, and in json.",
        ),
        initial_prompt=option(
            metavar="TEXT", help="Text before the audio: names and spellings that it has."
        ),
        condition_on_previous_text=option(
            "--condition-on-previous-text/--no-condition-on-previous-text",
            default=None,
            help="Whether a window continues the text of the one before.",
        ),
        compression_ratio_threshold=option(
            type=threshold,
            metavar="FLOAT",
            help="A window whose text compresses better is decoded again, at a higher temperature.",
        ),
        logprob_threshold=option(
            type=threshold,
            metavar="FLOAT",
            help="The same below this log-probability of a token, the mean.",
        ),
        no_speech_threshold=option(
            type=threshold,
            metavar="FLOAT",
            help="A window whose probability of no speech is higher, and of its text low, is none.",
        ),
        best_of=option(
            type=COUNT,
            help="Texts sampled of a window that is decoded again; the most probable counts [1].",
        ),
        hot_words=option(
            "--hot-word",
            multiple=True,
            metavar="TEXT",
            help="A name or phrase that is favoured. May be repeated.",
        ),
        hot_word_gain=option(
            type=FiniteRange(0, 100),
            metavar="FLOAT",
            help="What each token of one gains in log-probability [2].",
        ),
        output_format=option(
            type=click.Choice(_FORMATS),
            default="txt",
            show_default=True,
            help="Of a transcript: text, JSON with all there is, or subtitles.",
        ),
        output_dir=option(
            type=PATH, help="Folder for a file of each audio, named after it [stdout]."
        ),
    )


def check_with_audio(given: Collection[str]) -> None:
    """Refuse options ``given`` on the command line that contradict --audio, or need it.

    Raises:
        click.UsageError: naming both options and the fix.
    """
    if "--audio" not in given:
        for needing in NEEDING_AUDIO:
            if needing in given:
                raise click.UsageError(f"{needing} needs --audio; add it, or leave {needing} out")
        return
    for other, fix in NEVER_WITH_AUDIO.items():
        if other in given:
            raise click.UsageError(f"--audio and {other} contradict each other: {fix}")
