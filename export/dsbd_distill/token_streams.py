"""Tokens of all data of a distillation, as streams on disk: texts and chats, sources, or sound.

A source is a line of a file: a text, or in a ``.jsonl`` file a string, or an object with a field
``source`` or ``text``.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dsbd_distill.config import DistillConfig
from dsbd_distill.sounds import Hear, write_windows
from dsbd_distill.work_folder import WorkFolder
from dsbd_export.chats import MOST_NEW, MOST_PROMPT, ChatTokens
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.json_files import json_object
from dsbd_export.errors import ExportError
from dsbd_export.progress import Counter, Report, counted
from dsbd_export.texts import (
    CHATS,
    SOURCES,
    WINDOWS,
    TextFile,
    TokenStreams,
    json_lines,
    open_streams,
    opened_sinks,
    write_streams,
)
from dsbd_export.tokenizers.tokenizer_files import write_tokenizer_files
from dsbd_runtime.bundle_files.bundle import (
    GENERATION_CONFIG_FILE,
    SOURCE_TOKENIZER_FILE,
    TOKENIZER_FILE,
)
from dsbd_runtime.text.tokenizer import Tokenizer

MOST_SOURCE = 512  # tokens of a source, if the encoder reads as many
_LEFT_OUT = "are longer than {longest} tokens and are left out"


def token_streams(
    config: DistillConfig,
    checkpoint: Checkpoint,
    files: list[TextFile],
    work: WorkFolder,
    report: Report,
    hear: Hear | None,
) -> TokenStreams:
    """Return the tokens of all data, stored before or now; raise ExportError for bad data."""
    encoder = checkpoint.encoder
    begin = target_begin(checkpoint) if encoder is not None and encoder.speech is None else []
    if not work.tokens.exists():
        reads_sound = encoder is not None and encoder.speech is not None
        kind = "reading {:,} files of audio" if reads_sound else "tokenizing {:,} files"
        phase = kind.format(len(files))
        report(phase)
        remaining = counted(files, Counter(phase, "files", report))
        if encoder is None:
            _write_texts(config, checkpoint, remaining, work, report)
        elif encoder.speech is None:
            _write_sources(checkpoint, remaining, begin, work, report)
        elif hear is None:
            raise ExportError(
                f"the target at {checkpoint.folder} (family {checkpoint.family}) reads sound, and "
                "hear is missing, which reads audio; use dsbd-distill, or pass it"
            )
        else:
            write_windows(remaining, hear, encoder.speech, work.features, work.tokens)
    if encoder is None:
        streams = open_streams(work.tokens, CHATS)
        report(f"{_sizes(streams)}: {streams.split}")
        return streams
    return _opened_sources(work, SOURCES if encoder.speech is None else WINDOWS, report)


def _sizes(streams: TokenStreams) -> str:
    texts = f"{len(streams.train):,} tokens to learn from, {len(streams.held_out):,} held out"
    prompts = (
        f"{len(streams.train_prompts):,} prompts of chats to learn from, "
        f"{len(streams.held_out_prompts):,} held out"
    )
    shown = {texts: streams.has_texts, prompts: streams.has_chats}
    return "; ".join(text for text, is_shown in shown.items() if is_shown)


def _opened_sources(work: WorkFolder, kind: str, report: Report) -> TokenStreams:
    streams = open_streams(work.tokens, kind)
    if not len(streams.train_prompts):
        wanted = "lines of text" if kind == SOURCES else "files of audio"
        raise ExportError(f"data contains no {kind}; give {wanted}")
    report(
        f"{len(streams.train_prompts):,} {kind} to learn from, "
        f"{len(streams.held_out_prompts):,} held out: {streams.split}"
    )
    return streams


def _tokenizer_folder(checkpoint: Checkpoint, work: WorkFolder, report: Report) -> Path:
    folder = work.path / "tokenizer"
    folder.mkdir(exist_ok=True)
    write_tokenizer_files(checkpoint, folder, report)
    return folder


def _write_texts(
    config: DistillConfig,
    checkpoint: Checkpoint,
    files: Iterable[TextFile],
    work: WorkFolder,
    report: Report,
) -> None:
    folder = _tokenizer_folder(checkpoint, work, report)
    tokenizer = Tokenizer(folder, bos_token_id=checkpoint.bos_token_id)
    eos = checkpoint.eos_token_ids[0] if checkpoint.eos_token_ids else None
    room = min(MOST_NEW, checkpoint.context_length // 2)
    longest = min(MOST_PROMPT, checkpoint.context_length - room)
    chats = ChatTokens(folder, tokenizer, longest=longest, learns_answers=config.learn_answers)
    write_streams(files, tokenizer, chats, eos, work.tokens)
    if chats.num_left_out:
        what = _LEFT_OUT.format(longest=longest)
        report(f"warning: {chats.num_left_out:,} prompts of chats {what}")


def _write_sources(
    checkpoint: Checkpoint,
    files: Iterable[TextFile],
    begin: list[int],
    work: WorkFolder,
    report: Report,
) -> None:
    """begin: the tokens that every target begins with, which are put after each source."""
    assert checkpoint.encoder is not None  # the caller has asked
    longest = min(MOST_SOURCE, checkpoint.encoder.context_length)
    reader = SourceTokens(_tokenizer_folder(checkpoint, work, report), checkpoint, longest)
    with opened_sinks(work.tokens) as sink_of:
        for file in files:
            for name, text in sources_of(file):
                if ids := reader.token_ids(text):
                    sink_of(name).write_prompt([*ids, *begin])
    if reader.num_left_out:
        report(f"warning: {reader.num_left_out:,} sources {_LEFT_OUT.format(longest=longest)}")


def target_begin(checkpoint: Checkpoint) -> list[int]:
    """Return the tokens that targets begin with; raise ExportError if their language is open."""
    encoder = checkpoint.encoder
    assert encoder is not None  # the caller has asked
    file, name = checkpoint.folder / GENERATION_CONFIG_FILE, "forced_bos_token_id"
    content = json_object(file) if file.is_file() else {}
    forced = content.get(name, getattr(checkpoint.config, name, None))
    if forced is not None:
        return [encoder.start_token_id, int(forced)]
    if encoder.languages is not None:
        raise ExportError(
            f"the target at {checkpoint.folder} (family {checkpoint.family}) translates between "
            f"{len(encoder.languages)} languages, and its generation_config.json has no {name}: a "
            "draft is trained for one language of targets; write its token there"
        )
    return [encoder.start_token_id]


def sources_of(file: TextFile) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every source of a file; raise ExportError for a line without one."""
    if file.path.suffix == ".jsonl":
        for name, where, content in json_lines(file):
            yield name, _source_in(content, where)
        return
    with file.path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{file.name}:{number}", line.strip()


def _source_in(content: Any, where: str) -> str:
    if isinstance(content, dict):
        if "messages" in content:
            raise ExportError(
                f"{where} is a chat, but the target is an encoder-decoder, which has no chats; "
                'write {"source": "..."}'
            )
        if "source" in content and "text" in content:
            raise ExportError(f"{where} has both a source and a text; write one of them")
        content = content.get("source", content.get("text"))
    if not isinstance(content, str):
        raise ExportError(
            f'{where} has no source; write a string, {{"source": "..."}} or {{"text": "..."}}'
        )
    return content


class SourceTokens:
    """Turns sources into the tokens that the encoder reads, as requests do."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, longest: int) -> None:
        """Take the folder of the tokenizer, and the most tokens that a source may have."""
        has_own = (folder / SOURCE_TOKENIZER_FILE).is_file()
        self._tokenizer = Tokenizer(
            folder,
            bos_token_id=None if has_own else checkpoint.bos_token_id,
            file=SOURCE_TOKENIZER_FILE if has_own else TOKENIZER_FILE,
        )
        assert checkpoint.encoder is not None  # the caller has asked
        self._encoder = checkpoint.encoder
        self.longest = longest
        self.num_left_out = 0

    def token_ids(self, text: str) -> list[int]:
        """Return the tokens of a source, [] if it is too long."""
        size, unknown = self._encoder.vocab_size, self._encoder.unknown_token_id
        ids = self._tokenizer.encode(text)
        if unknown is not None:
            ids = [token if token < size else unknown for token in ids]
        if len(ids) > self.longest:
            self.num_left_out += 1
            return []
        return ids
