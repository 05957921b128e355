"""Times and word errors of all tools on the same utterances, in turn."""

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
PAUSE_S = 0.25  # in this time the previous tool's threads stop spinning


@dataclass(frozen=True, kw_only=True)
class Work:
    """Utterances that all tools transcribe with the same settings.

    Attributes:
        title: heading of its table.
        timestamps: whether texts have times.
        rounds: number of rounds; each transcribes every utterance once.
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
        """Milliseconds per second of audio."""
        return float(1e3 * self.answer["seconds"] / self.spoken.seconds)

    def part(self, name: str) -> float:
        """Return the milliseconds of a part per second of audio."""
        return float(1e3 * self.answer["parts"][name] / self.spoken.seconds)

    @property
    def decoder(self) -> float:
        """Milliseconds of the decoder per second of audio: all except features and encoder."""
        return self.milliseconds - self.part(FEATURES) - self.part(ENCODER)


def transcribed(
    work: Work, tools: Sequence[OpenTool], report: Callable[[str], None]
) -> Iterator[Transcribed]:
    """Yield the transcripts of all tools for every utterance, one after another.

    As warm-up each tool first transcribes the last utterance (not the first one, whose window
    dsbd-ort would still have). A tool that fails is reported and then left out.
    """
    running = list(tools)
    for number in range(-1, work.rounds):  # -1: warm-up
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


def lines_of(
    work: Work, tools: Sequence[OpenTool], requests: Sequence[Transcribed]
) -> Iterator[str]:
    """Yield the lines of the table of a work."""
    by_key = {
        tool.tool.key: [each for each in requests if each.key == tool.tool.key] for tool in tools
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
    of_tool, precision = by_key[tool.tool.key], tool.tool.precision
    counterpart = tool.tool.counterpart
    ratio = ""
    if counterpart is not None and (ours := by_key.get(f"{OURS}, {counterpart}")):
        ratio = _ratio(ours, of_tool)
    medians = [
        statistics.median(values)
        for values in (
            [each.part(FEATURES) for each in of_tool],
            [each.part(ENCODER) for each in of_tool],
            [each.decoder for each in of_tool],
        )
    ]
    errors = word_error_rate((each.answer["text"], each.spoken.utterance.text) for each in of_tool)
    return (
        f"{tool.tool.name} {tool.version}",
        precision,
        spread_cell(spread([each.milliseconds for each in of_tool])),
        *(f"{value:.1f}" for value in medians),
        ratio,
        str(sum(each.answer["num_tokens"] for each in of_tool if each.round == 0)),
        f"{errors:.1%}",
        f"{max(each.answer['peak_bytes'] for each in of_tool) / 1e6:.0f}",
    )


def _ratio(ours: Sequence[Transcribed], theirs: Sequence[Transcribed]) -> str:
    """Return the median of their time / our time for the same utterance and round."""
    our_times = {(each.spoken.path, each.round): each.milliseconds for each in ours}
    ratios = [
        each.milliseconds / our_times[each.spoken.path, each.round]
        for each in theirs
        if (each.spoken.path, each.round) in our_times
    ]
    return ratio_cell(bootstrap(ratios, "median")) if ratios else ""
