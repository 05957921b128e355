"""Times and word errors of all tools over the same utterances, in turn."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsbd_ort.benchmark.bootstrap import bootstrap, spread
from lab.frame.page import ratio_cell, spread_cell
from lab.frame.rounds import turn
from lab.peers.catalog import PeerError
from lab.transcription.runners.serve import ENCODER, FEATURES, Asked
from lab.transcription.speech import Spoken
from lab.transcription.tools import OURS, OpenTool
from lab.transcription.word_errors import word_error_rate
from scripts.document_sections import table

COLUMNS = (
    "tool",
    "precision",
    "ms per second of audio",
    "features",
    "encoder",
    "decoder",
    "ours faster by",
    "tokens",
    "word errors",
    "peak MB",
)
PAUSE_S = 0.25  # by then the threads of the tool before have stopped spinning


@dataclass(frozen=True, kw_only=True)
class Work:
    """Utterances that all tools transcribe with the same settings.

    Attributes:
        title: of its table.
        timestamps: whether texts have times.
        rounds: each of which transcribes every utterance once.
    """

    title: str
    spoken: Sequence[Spoken]
    num_beams: int
    timestamps: bool
    rounds: int


@dataclass(frozen=True, kw_only=True)
class Transcribed:
    """One request of one tool."""

    key: str
    spoken: Spoken
    round: int
    answer: dict[str, Any]

    @property
    def milliseconds(self) -> float:
        """Of a second of audio."""
        return float(1e3 * self.answer["seconds"] / self.spoken.seconds)

    def part(self, name: str) -> float:
        """Return the milliseconds of a part, of a second of audio."""
        return float(1e3 * self.answer["parts"][name] / self.spoken.seconds)

    @property
    def decoder(self) -> float:
        """Seconds of the decoder: all except features and encoder."""
        return self.milliseconds - self.part(FEATURES) - self.part(ENCODER)


def transcribed(
    work: Work, tools: Sequence[OpenTool], report: Callable[[str], None]
) -> Iterator[Transcribed]:
    """Yield what every tool makes of every utterance, one after another.

    Before, each transcribes the last one, which does not count: not the first, whose window ours
    would still know. A tool that fails is reported, and left out from then on.
    """
    running = list(tools)
    for number in range(-1, work.rounds):  # -1: before the first
        for spoken in work.spoken[-1:] if number < 0 else work.spoken:
            for tool in list(turn(running, number)):
                asked = Asked(
                    path=str(spoken.path.resolve()),
                    language=spoken.utterance.language,
                    num_beams=work.num_beams,
                    timestamps=work.timestamps,
                )
                time.sleep(PAUSE_S)
                try:
                    answer = tool.transcribe(asked)
                except PeerError as error:
                    report(f"{tool.tool.key}, {spoken.utterance.name}: {error}")
                    running.remove(tool)
                    continue
                if number >= 0:
                    yield Transcribed(key=tool.tool.key, spoken=spoken, round=number, answer=answer)


def lines_of(work: Work, tools: Sequence[OpenTool], found: Sequence[Transcribed]) -> Iterator[str]:
    """Yield the table of a work, and how ours stands to what is aimed at."""
    by_key = {
        tool.tool.key: [each for each in found if each.key == tool.tool.key] for tool in tools
    }
    seconds = sum(each.seconds for each in work.spoken)
    times = "with times" if work.timestamps else "without times"
    yield f"### {work.title}, {_searched(work.num_beams)}"
    yield ""
    yield f"{len(work.spoken)} files of {seconds:.0f} s in all, {times}; rounds: {work.rounds}."
    yield ""
    cells = [_cells(tool, by_key) for tool in tools if by_key[tool.tool.key]]
    yield from table(COLUMNS, cells)


def _searched(num_beams: int) -> str:
    return "greedy" if num_beams == 1 else f"{num_beams} beams"


def _cells(tool: OpenTool, by_key: dict[str, list[Transcribed]]) -> tuple[str, ...]:
    own, precision = by_key[tool.tool.key], tool.tool.precision
    counterpart = tool.tool.counterpart
    ratio = ""
    if counterpart is not None and (ours := by_key.get(f"{OURS}, {counterpart}")):
        ratio = _ratio(ours, own)
    medians = [
        statistics.median(values)
        for values in (
            [each.part(FEATURES) for each in own],
            [each.part(ENCODER) for each in own],
            [each.decoder for each in own],
        )
    ]
    errors = word_error_rate((each.answer["text"], each.spoken.utterance.text) for each in own)
    return (
        f"{tool.tool.name} {tool.version}",
        precision,
        spread_cell(spread([each.milliseconds for each in own])),
        *(f"{value:.1f}" for value in medians),
        ratio,
        str(sum(each.answer["num_tokens"] for each in own if each.round == 0)),
        f"{errors:.1%}",
        f"{max(each.answer['peak_bytes'] for each in own) / 1e6:.0f}",
    )


def _ratio(ours: Sequence[Transcribed], theirs: Sequence[Transcribed]) -> str:
    """Return the median of their time over ours, of the same utterance in the same round."""
    own = {(each.spoken.path, each.round): each.milliseconds for each in ours}
    ratios = [
        each.milliseconds / own[each.spoken.path, each.round]
        for each in theirs
        if (each.spoken.path, each.round) in own
    ]
    return ratio_cell(bootstrap(ratios, "median")) if ratios else ""
