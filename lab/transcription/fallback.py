"""The processor's time of sounds without clear speech, which fall back to higher temperatures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dsbd_ort.benchmark.bootstrap import spread
from lab.frame.page import spread_cell
from lab.frame.rounds import turn
from lab.transcription.runners.serve import ALIKE, OWN, Asked, read_samples
from lab.transcription.sounds import without_clear_speech
from lab.transcription.speech import Utterance, spoken, write_wav
from lab.transcription.tools import OURS, OpenTool
from scripts.document_sections import table

SENTENCE = Utterance(
    name="short-sentence",
    language="en",
    voice="en",
    words_per_minute=260,
    text="Could you send the other half on Thursday?",
)
LANGUAGES = (None, "en")
COLUMNS = ("sound", "language", "settings", "tool", "CPU s", "ours / theirs", "text")
_SHOWN = 40  # characters


def unclear_sounds(work: Path, python: Path) -> dict[str, Path]:
    """Return the files of the sounds by name; those that are missing are made."""
    folder = work / "unclear"
    (sentence,) = spoken(folder, [SENTENCE], python)
    files = {}
    for name, samples in without_clear_speech(read_samples(str(sentence.path))):
        files[name] = folder / f"{name.replace(' ', '-')}.wav"
        if not files[name].exists():
            write_wav(files[name], samples)
    return files


def compare(
    files: dict[str, Path],
    tools: Sequence[OpenTool],
    rounds: int,
    report: Callable[[str], None],
) -> list[str]:
    """Return the lines of a table: medians of the rounds, each of which runs every tool in turn.

    A first round does not count. No tool gets a sound twice in a row: ours would still know it.
    """
    cases = [
        (language, fallback, name)
        for fallback in (ALIKE, OWN)
        for language in LANGUAGES
        for name in files
    ]
    seconds: dict[tuple[str | None, str, str, str], list[float]] = {}
    texts: dict[tuple[str | None, str, str, str], str] = {}
    for number in range(-1, rounds):
        for language, fallback, name in cases:
            for tool in turn(tools, number):
                asked = Asked(
                    path=str(files[name].resolve()),
                    language=language,
                    num_beams=5,
                    timestamps=True,
                    fallback=fallback,
                )
                answer = tool.transcribe(asked)
                key = (language, fallback, name, tool.tool.key)
                texts[key] = answer["text"].strip()
                if number >= 0:
                    seconds.setdefault(key, []).append(answer["seconds"])
        report(f"fallback: {number + 1} of {rounds} rounds")
    return table(COLUMNS, list(_rows(cases, tools, seconds, texts)))


def _rows(
    cases: Sequence[tuple[str | None, str, str]],
    tools: Sequence[OpenTool],
    seconds: dict[tuple[str | None, str, str, str], list[float]],
    texts: dict[tuple[str | None, str, str, str], str],
) -> Iterator[tuple[str, ...]]:
    for language, fallback, name in cases:
        for tool in tools:
            own = seconds[language, fallback, name, tool.tool.key]
            ratio = ""
            if tool.tool.counterpart is not None:
                ours = seconds[language, fallback, name, f"{OURS}, {tool.tool.counterpart}"]
                ratio = f"{statistics.median(ours) / statistics.median(own):.2f}"
            text = texts[language, fallback, name, tool.tool.key][:_SHOWN]
            yield (
                name,
                language or "detected",
                fallback,
                tool.tool.key,
                spread_cell(spread(own)),
                ratio,
                text.replace("|", " "),
            )
