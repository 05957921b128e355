"""Arguments of dsbd-run: its options, their contradictions, and the prompt."""

import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from dsbd_errors.text_files import text_of
from dsbd_ort.commands.option_types import COUNT, PATH, JsonObjectType, TokenIdsType
from dsbd_ort.commands.options import (
    argument,
    decoding_options,
    flag,
    flags_of_section,
    no_flag,
    option,
    pipeline_settings,
)
from dsbd_ort.commands.speech_options import (
    SECTION,
    SpeechArguments,
    check_with_audio,
    speech_options,
)
from dsbd_ort.pipeline import PipelineSettings

STANDARD_STREAM = Path("-")
_NO_PROMPT = "no prompt; give --prompt, --prompt-file or text on stdin"
_PROMPT, _OUTPUT = "Prompt", "Output"  # sections of the help
_BATCH = "Many prompts, one JSON object a line"
_EXCLUDE = [  # (option, option, fix)
    ("--prompt", "--prompt-file", "give one of them, not both"),
    *(("--ids", other, "give one prompt") for other in ("--prompt", "--prompt-file", "--image")),
    ("--ids", "--chat", "token ids are the whole prompt, no message; leave --chat out"),
    ("--ids", "--stream", "its answer is printed as token ids; leave --stream out"),
    ("--stream", "--json", "one streams text, the other prints one object; use one"),
    *(
        ("--input", other, "the prompts are the lines of --input; leave the other out")
        for other in ("--prompt", "--prompt-file", "--ids", "--image")
    ),
    *(
        ("--input", other, "--output gets one JSON object per line with statistics; leave it out")
        for other in ("--stream", "--json", "--stats")
    ),
    ("--input", "--trace", "a trace draws one request; give one prompt with --prompt"),
    (
        "--workers",
        "--concurrency",
        "requests of several processes share no calls; give one of them",
    ),
    ("--cluster", "--concurrency", "a replica answers one line at a time; give --replicas"),
    ("--cluster", "--workers", "replicas take the place of workers; give --replicas"),
]
_NEED = [  # (option, the option that it needs)
    ("--input", "--output"),
    ("--output", "--input"),
    ("--workers", "--input"),
    ("--cluster", "--input"),
    ("--replicas", "--cluster"),
    ("--system", "--chat"),
    ("--chat-template-kwargs", "--chat"),
    ("--no-chat-defaults", "--chat"),
]


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """The arguments of dsbd-run. ``options`` are the fields of DecodingConfig that were given."""

    prompt: str | None = option(
        help="Text to continue; with --chat the user's message.", section=_PROMPT
    )
    prompt_file: Path | None = option(type=PATH, help="File with the text.", section=_PROMPT)
    ids: list[int] | None = option(
        type=TokenIdsType(),
        help="Token ids to continue, without special tokens around them; prints the new ids.",
        section=_PROMPT,
        is_rare=True,
    )
    image: tuple[Path, ...] = option(
        type=PATH,
        multiple=True,
        metavar="FILE",
        help="Picture that the prompt is about, for models that read pictures. May be repeated, "
        "and more files may follow.",
        section=_PROMPT,
    )
    chat: bool = flag(help="Apply the checkpoint's chat template to the prompt.", section=_PROMPT)
    system: str | None = option(metavar="TEXT", help="System message of a --chat.", section=_PROMPT)
    chat_template_kwargs: dict[str, Any] | None = option(
        type=JsonObjectType(),
        metavar="JSON",
        help='More variables of the chat template, such as {"enable_thinking": false}.',
        section=_PROMPT,
        is_rare=True,
    )
    chat_defaults: bool = no_flag(
        "--no-chat-defaults",
        help="With --chat: use the same defaults of temperature, top_p and max_new_tokens as "
        "without --chat.",
        section=_PROMPT,
        is_rare=True,
    )
    stream: bool = flag(
        help="Print text as soon as all live beams agree on it; always done at a terminal.",
        section=_OUTPUT,
    )
    as_json: bool = flag("--json", help="Print one JSON object per prompt.", section=_OUTPUT)
    stats: bool = flag(help="Print statistics to stderr.", section=_OUTPUT)
    trace: Path | None = option(
        type=PATH,
        help="Draw the forest of every iteration: a page (.html), or its data (.json).",
        section=_OUTPUT,
        is_rare=True,
    )
    input: Path | None = option(
        type=PATH, help="JSONL file with many prompts; -: stdin.", section=_BATCH
    )
    output: Path | None = option(
        type=PATH, help="JSONL file for their answers; -: stdout.", section=_BATCH
    )
    workers: int | None = option(
        type=COUNT,
        help="Processes that answer --input and share --threads [1].",
        section=_BATCH,
        is_rare=True,
    )
    concurrency: int | None = option(
        type=COUNT,
        help="How many lines of --input, or files of --audio, are computed together [1].",
        section=_BATCH,
    )
    cluster: str | None = option(
        metavar="ADDRESS",
        help="Answer --input on a Ray cluster, HOST:PORT or auto; --output is then a folder.",
        section=_BATCH,
        is_rare=True,
    )
    replicas: int | None = option(
        type=COUNT,
        help="Actors of the --cluster that answer and share --threads [1].",
        section=_BATCH,
        is_rare=True,
    )
    audio: tuple[Path, ...] = option(
        type=PATH,
        multiple=True,
        metavar="FILE",
        help="Audio file to transcribe; -: stdin. May be repeated, and more files may follow.",
        section=SECTION,
    )
    speech: SpeechArguments = speech_options()
    options: dict[str, Any] = decoding_options()
    pipeline: PipelineSettings = pipeline_settings()
    more_files: tuple[Path, ...] = argument(type=PATH, nargs=-1, metavar="")

    def check(self, given: Collection[str]) -> None:
        """Raise click.UsageError for contradictions among the options ``given``."""
        check_with_audio(given, flags_of_section(SECTION))
        if self.more_files and not (self.audio or self.image):
            raise click.UsageError(
                f"unexpected argument {self.more_files[0]}; files follow the first of --audio or "
                "--image, a prompt is given with --prompt"
            )
        for one, other, fix in _EXCLUDE:
            if one in given and other in given:
                raise click.UsageError(f"{one} and {other} contradict each other: {fix}")
        for needing, needed in _NEED:
            is_there = needed in given or (needed == "--chat" and self.is_chat)
            if needing in given and not is_there:
                raise click.UsageError(f"{needing} needs {needed}; add it, or leave {needing} out")
        if "--concurrency" in given and not {"--input", "--audio"} & {*given}:
            raise click.UsageError(
                "--concurrency needs --input or --audio; add one, or leave --concurrency out"
            )
        if self.stream and not self.can_stream and self.audio:
            raise click.UsageError(
                "--stream prints the text of one audio as it is decoded, without times; leave it "
                "out, or give one --audio, txt and no --timestamps"
            )
        if self.stream and not self.can_stream:
            raise click.UsageError(
                "--stream prints the best sequence alone, but --num-return-sequences is "
                f"{self.options['num_return_sequences']}; use 1, or leave --stream out"
            )
        if self.cluster is not None and self.output == STANDARD_STREAM:
            raise click.UsageError(
                "--output is - (stdout), but with --cluster it is a folder, on a disk that "
                "survives this process; give a folder"
            )

    @property
    def opening(self) -> PipelineSettings:
        """How the bundle is opened, for chats or for texts."""
        return replace(self.pipeline, chat_defaults=self.is_chat and self.chat_defaults)

    @property
    def is_chat(self) -> bool:
        """Whether a prompt is a user's message; a prompt with pictures always is."""
        return self.chat or bool(self.image)

    @property
    def audio_files(self) -> tuple[Path, ...]:
        return self.audio + self.more_files if self.audio else ()

    @property
    def image_files(self) -> tuple[Path, ...]:
        return self.image + self.more_files if self.image else ()

    @property
    def streams_text(self) -> bool:
        """Whether text is printed while it is decoded, as always at a terminal."""
        is_read_along = sys.stdout is not None and sys.stdout.isatty()
        return self.can_stream and (self.stream or is_read_along)

    @property
    def can_stream(self) -> bool:
        """Whether the output is the text of one sequence, or of one audio."""
        if self.audio:
            is_text = self.speech.output_format == "txt" and not self.speech.timestamps
            return is_text and self.speech.output_dir is None and len(self.audio_files) == 1
        is_text = not self.as_json and self.ids is None
        return is_text and self.options.get("num_return_sequences", 1) == 1

    def read_prompt(self) -> str | list[int] | None:
        """Return the prompt, None to read prompts at the terminal; click.UsageError: no prompt."""
        if self.ids is not None:
            return self.ids
        text, file = self.prompt, self.prompt_file
        if text is None and file is None:
            if sys.stdin is None:  # closed by the parent process
                raise click.UsageError(_NO_PROMPT)
            if sys.stdin.isatty():
                return None
        if text is None:
            source = "the prompt on stdin" if file is None else f"--prompt-file {file}"
            try:
                text = text_of(sys.stdin.buffer.read() if file is None else file.read_bytes())
            except (OSError, UnicodeError) as error:
                raise click.UsageError(f"{source} cannot be read as UTF-8 text: {error}") from error
            if not text and file is None and not self.image:
                raise click.UsageError(_NO_PROMPT)
        return text
