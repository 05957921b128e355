"""The tools that transcribe, each in a separate process."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.frame.page import ROOT
from lab.peers.catalog import PeerError
from lab.peers.prepare import converted_folder, environment_python
from lab.peers.runner_process import RunnerProcess
from lab.transcription.runners.serve import Asked, Job

OURS, FASTER_WHISPER, TRANSFORMERS = "dsbd-ort", "faster-whisper", "transformers"
INSTALLS = (("faster-whisper==1.2.1", "ctranslate2==4.8.5", "espeakng-loader==0.2.4"),)
_PATHS = (ROOT, ROOT / "export", ROOT / "runtime")
_VOCABULARY = "vocabulary.json"


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool in one precision.

    Attributes:
        name, precision: name and precision shown in its row.
        runner: module in lab.transcription.runners.
        counterpart: our precision to compare with; None for our own tools.
    """

    name: str
    precision: str
    runner: str
    counterpart: str | None = None

    @property
    def key(self) -> str:
        """The name of its row: tool and precision."""
        return f"{self.name}, {self.precision}"


TOOLS = (
    Tool(name=OURS, precision="fp32", runner="run_dsbd_ort"),
    Tool(name=OURS, precision="int8", runner="run_dsbd_ort"),
    Tool(name=FASTER_WHISPER, precision="fp32", runner="run_faster_whisper", counterpart="fp32"),
    Tool(name=FASTER_WHISPER, precision="int8", runner="run_faster_whisper", counterpart="int8"),
    Tool(name=TRANSFORMERS, precision="fp32", runner="run_transformers", counterpart="fp32"),
)


@dataclass(frozen=True, kw_only=True)
class Models:
    """One model in the form of every tool.

    Attributes:
        checkpoint: folder of transformers.
        ct2: folder in CTranslate2's format, or None.
        bundles: our bundles by precision.
    """

    checkpoint: Path
    ct2: Path | None
    bundles: dict[str, Path]

    def folder(self, tool: Tool) -> Path | None:
        """Return the folder that a tool opens, None if it is not given."""
        if tool.name == OURS:
            return self.bundles[tool.precision]
        return self.ct2 if tool.name == FASTER_WHISPER else self.checkpoint


def environment(work: Path) -> Path:
    """Return the Python of an environment with faster-whisper and eSpeak NG; raises PeerError."""
    return environment_python(work / "venv", INSTALLS)


def ct2_folder(given: Path, checkpoint: Path, work: Path) -> Path:
    """Return a folder in CTranslate2's format with all files that faster-whisper reads.

    given: folder with model.bin and config.json of the same weights. If it has no vocabulary.json,
        the names of tokens come from the checkpoint's tokenizer.json.
    """

    def complete(partial: Path) -> None:
        for file in given.iterdir():
            os.symlink(file.resolve(), partial / file.name)
        for name in ("tokenizer.json", "preprocessor_config.json"):
            if (checkpoint / name).exists() and not (partial / name).exists():
                os.symlink((checkpoint / name).resolve(), partial / name)
        if not (partial / _VOCABULARY).exists():
            content = json.dumps(_names_of_tokens(checkpoint / "tokenizer.json"))
            (partial / _VOCABULARY).write_text(content, encoding="utf-8")

    return converted_folder(work / "ct2", complete)


def _names_of_tokens(tokenizer: Path) -> list[str]:
    content = json.loads(tokenizer.read_text(encoding="utf-8"))
    ids = dict(content["model"]["vocab"])
    ids |= {token["content"]: token["id"] for token in content["added_tokens"]}
    return sorted(ids, key=ids.__getitem__)


class OpenTool:
    """A tool with a running process."""

    def __init__(self, tool: Tool, process: RunnerProcess) -> None:
        self.tool = tool
        self._process = process
        opened = process.open()
        self.version, self.settings = opened["version"], opened["settings"]

    def transcribe(self, asked: Asked) -> dict[str, Any]:
        """Return text, num_tokens, seconds, parts and peak_bytes of one request."""
        return self._process.ask("transcribe", dataclasses.asdict(asked))


def open_tools(
    tools: Sequence[Tool],
    models: Models,
    work: Path,
    threads: int,
    cpu_time: bool,
    enter: Callable[[RunnerProcess], RunnerProcess],
    report: Callable[[str], None],
) -> list[OpenTool]:
    """Start all tools that can be started; report the others.

    cpu_time: whether to measure CPU time. enter: ``enter_context`` of the ExitStack that ends the
        processes.
    """
    opened = []
    for tool in tools:
        folder = models.folder(tool)
        if folder is None:
            report(f"{tool.key}: not run, no folder of its form is given")
            continue
        job = Job(
            folder=str(folder.resolve()),
            precision=tool.precision,
            num_threads=threads,
            cpu_time=cpu_time,
        )
        try:
            python = environment(work) if tool.name == FASTER_WHISPER else Path(sys.executable)
            process = RunnerProcess(
                python,
                tool.runner,
                job,
                work / "logs" / f"{tool.key.replace(', ', '-')}.log",
                package="lab.transcription.runners",
                import_from=(ROOT,) if tool.name == FASTER_WHISPER else _PATHS,
            )
            opened.append(OpenTool(tool, enter(process)))
        except PeerError as error:
            report(f"{tool.key}: {error}")
    return opened
