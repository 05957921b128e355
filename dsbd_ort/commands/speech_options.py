"""Options of dsbd-run for audio: the input, the output formats, and when to decode again."""

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
_ON_STDOUT = ("txt", "json")  # formats in which several transcripts can follow one another

NEVER_WITH_AUDIO = {
    "--prompt": "the audio is the prompt; --initial-prompt is text that came before it",
    "--prompt-file": "the audio is the prompt; --initial-prompt is text that came before it",
    "--ids": "the audio is the prompt",
    "--image": "a prompt has pictures or sound; chats over HTTP and from Python take several",
    "--input": "its lines are texts; repeat --audio for several files",
    "--output": "use --output-dir, or redirect stdout",
    "--chat": "a speech model holds no conversation",
    "--json": "use --output-format json",
    "--trace": "an audio needs many requests, a trace draws one",
    "--workers": "use --concurrency, which computes files together",
    "--cluster": "files are transcribed on this machine",
    "--src-lang": "use --language: that of the audio",
    "--tgt-lang": "--task translate writes English, --task transcribe the language of the audio",
    "--stop": "a text ends with its window",
}
"""Options that contradict --audio, and the fix."""


@dataclass(frozen=True, kw_only=True)
class SpeechArguments:
    """How audio is transcribed, and where transcripts go."""

    keywords: dict[str, Any]  # the given keywords of ``Pipeline.transcribe``
    timestamps: str | None  # times to write in any format: "segment" or "word"; None: no times
    output_format: str
    output_dir: Path | None  # folder for one file per audio; None: stdout

    def check(self, num_files: int, num_texts: int) -> None:
        """Raise click.UsageError for an output that cannot hold such transcripts."""
        if num_files > 1 and self.output_dir is None and self.output_format not in _ON_STDOUT:
            raise click.UsageError(
                f"--output-format {self.output_format} of {num_files} files makes several files; "
                f"give --output-dir, or use --output-format {' or '.join(_ON_STDOUT)}"
            )
        if num_texts > 1 and self.output_format != "json":
            raise click.UsageError(
                f"--num-return-sequences {num_texts} with --output-format {self.output_format}: "
                "only json has several texts of a window; use --output-format json"
            )

    def options(self, decoding: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords of ``Pipeline.transcribe``; ``decoding``: options of a request."""
        options = {**decoding, **self.keywords}
        if "temperature" in decoding:
            options["temperature"] = (decoding["temperature"],)
        if self.timestamps == WORD_TIMES:
            options["return_timestamps"] = WORD_TIMES
        elif self.timestamps or self.output_format in WITH_TIMES:
            options["return_timestamps"] = True
        return options


def _arguments(
    timestamps: str | None, output_format: str, output_dir: Path | None, **keywords: Any
) -> SpeechArguments:
    given = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in keywords.items()
        if value not in (None, ())
    }
    return SpeechArguments(
        keywords=given, timestamps=timestamps, output_format=output_format, output_dir=output_dir
    )


def speech_options() -> Any:
    """Return a field of SpeechArguments."""
    threshold: dict[str, Any] = {
        "type": FiniteRange(-1e6, 1e6),
        "metavar": "FLOAT",
        "is_rare": True,
    }
    return group(
        _arguments,
        section=SECTION,
        task=option(
            type=click.Choice(TASKS),
            help="Write the text in the language of the audio, or in English [transcribe].",
            is_rare=True,
        ),
        language=option(
            metavar="CODE", help="Language of the audio, such as de [detected in its first 30 s]."
        ),
        timestamps=option(
            is_flag=False,
            flag_value=_TIMED[0],
            type=click.Choice(_TIMED),
            metavar="[segment|word]",
            help="Also write the times of each segment, or each word, in txt and json; srt and vtt "
            "always have the times of segments.",
            is_rare=True,
        ),
        initial_prompt=option(
            metavar="TEXT",
            help="Text that comes before the audio, with names and spellings that occur in it.",
            is_rare=True,
        ),
        condition_on_previous_text=option(
            "--condition-on-previous-text/--no-condition-on-previous-text",
            default=None,
            help="Whether the model reads the text of the window before.",
            is_rare=True,
        ),
        compression_ratio_threshold=option(
            help="Decode a window again, at a higher temperature, if its text compresses better "
            "than this; repetitions compress well.",
            **threshold,
        ),
        logprob_threshold=option(
            help="The same if the mean log-probability of its tokens is lower than this.",
            **threshold,
        ),
        no_speech_threshold=option(
            help="Skip a window as silence if its no-speech probability is higher than this and "
            "its text improbable.",
            **threshold,
        ),
        vad=option(
            is_flag=True,
            default=None,
            help="Transcribe only the parts in which somebody speaks; needs the extra vad.",
        ),
        best_of=option(
            type=COUNT,
            help="Texts sampled for a window that is decoded again; the most probable is used [1].",
            is_rare=True,
        ),
        hot_words=option(
            "--hot-word",
            multiple=True,
            metavar="TEXT",
            help="A name or phrase to favour. May be repeated.",
            is_rare=True,
        ),
        hot_word_gain=option(
            type=FiniteRange(0, 100),
            metavar="FLOAT",
            help="Added to the log-probability for each token of a hot word [2]. If it is too "
            "large, the word appears where nobody said it.",
            is_rare=True,
        ),
        output_format=option(
            type=click.Choice(_FORMATS),
            default="txt",
            show_default=True,
            help="Format of transcripts: text, JSON with all details, or subtitles.",
        ),
        output_dir=option(
            type=PATH, help="Folder for one file per audio, named after it [stdout]."
        ),
    )


def check_with_audio(given: Collection[str], of_speech: Collection[str]) -> None:
    """Raise click.UsageError for flags ``given`` that contradict --audio or need it."""
    if "--audio" not in given:
        for needing in given:
            if needing in of_speech:
                raise click.UsageError(f"{needing} needs --audio; add it, or leave {needing} out")
        return
    for other, fix in NEVER_WITH_AUDIO.items():
        if other in given:
            raise click.UsageError(f"--audio and {other} contradict each other: {fix}")
