"""Fenced blocks of the documentation, and how to run them."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click
from click.testing import CliRunner

from dsbd_ort import cli
from lab.frame.server_process import server_process
from tests.cluster.own_cluster import own_cluster, serve_run

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "lab/README.md")]
DOCUMENTS += [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "lab/results").glob("*.md"))]

_DOCUMENTED_URL = "http://127.0.0.1:8000"
_FENCE = re.compile(
    r"^(?:<!-- test: (?:skip, (?P<reason>.+?)|with (?P<server>.+?)) -->\n)?"
    r"```(?P<language>sh|console|python)\n"
    r"(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_SHELL_SYNTAX = re.compile(r"[|<>&]|\$'")
_COMMANDS = {f"dsbd-{name}": getattr(cli, name) for name in ("run", "bench", "inspect", "distill")}
_QUICK = {  # a documented measurement runs, but not for as long
    "dsbd-distill": ["--steps", "2"],
    "dsbd-bench": ["--max-new-tokens", "2", "--repetitions", "1", "--prompts", "prompt.txt"],
}
_OWN_PROCESS = {"--workers", "--cluster"}
_NOT_HERE = ("pip", "pytest", ".", "git", "cd")  # installs, or would run these tests again


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        place: file and line, as "docs/run.md:9".
        language: "sh", "console" (commands after "$ ", each with its output) or "python".
        skip_reason: of the marker ``<!-- test: skip, reason -->`` in the line before it.
        server: of the marker ``<!-- test: with dsbd-serve ... -->``: the server that runs while the
            block does; its port replaces the documented one.
    """

    place: str
    language: str
    text: str
    skip_reason: str | None
    server: str | None = None


def blocks_of(document: Path, text: str) -> Iterator[Block]:
    """Yield the blocks of a document in the languages that can run."""
    for match in _FENCE.finditer(text):
        line = text[: match.start("language")].count("\n") + 1
        place = f"{document.relative_to(ROOT)}:{line}"
        yield Block(place, match["language"], match["text"], match["reason"], match["server"])


class ExportsOnce:
    """dsbd-export, in full once for each set of options; the next time its bundle is copied."""

    def __init__(self, folder: Path) -> None:
        """Keep the bundles in ``folder``."""
        self._folder = folder
        self._bundle_by_options: dict[tuple[str, ...], Path] = {}

    def run(self, arguments: list[str]) -> tuple[int, str]:
        """Run the command, return its exit code and what it printed."""
        if "-o" not in arguments:
            return _invoke(cli.export, arguments)
        at = arguments.index("-o")
        output = Path(arguments[at + 1])
        options = [*arguments[:at], *arguments[at + 2 :]]
        key = tuple(str(Path(o).resolve()) if Path(o).exists() else o for o in options)
        if key in self._bundle_by_options:
            shutil.rmtree(output, ignore_errors=True)
            shutil.copytree(self._bundle_by_options[key], output)
            return 0, ""
        exit_code, printed = _invoke(cli.export, arguments)
        if exit_code == 0:
            kept = self._folder / str(len(self._bundle_by_options))
            self._bundle_by_options[key] = Path(shutil.copytree(output, kept))
        return exit_code, printed


def run_block(block: Block, workspace: Path, exports: ExportsOnce) -> None:
    """Run a block in ``workspace``; raise AssertionError unless it does what it says."""
    with contextlib.chdir(workspace):
        if block.server:
            with _running(block.server) as url:
                text = block.text.replace(_DOCUMENTED_URL, url)
                run_block(replace(block, text=text, server=None), workspace, exports)
        elif block.language == "python":
            exec(compile(block.text, block.place, "exec"), {"__name__": "__documented__"})
        elif block.language == "sh":
            for command in _logical_lines(block.text):
                exit_code, output = _run(command, workspace, exports)
                assert exit_code == 0, f"{block.place}: {command}\n{output}"
        else:
            for command, expected in _sessions(block.text):
                exit_code, output = _run(command, workspace, exports)
                assert exit_code == (2 if "Error:" in expected else 0), output
                assert _fits(output, expected), f"{block.place}: {command}\n{output}"


@contextlib.contextmanager
def _running(command: str) -> Iterator[str]:
    """Give the URL of a server; it must end in order when the block is over."""
    name, *options = shlex.split(command)
    if name == "serve":
        with own_cluster() as cluster, serve_run(cluster, options[1:]) as served:
            yield served.url
        return
    assert name == "dsbd-serve", command
    try:
        with server_process(*options) as server:
            yield server.url
            assert server.end() == 0, command
    except RuntimeError as error:
        raise AssertionError(str(error)) from error


def _logical_lines(text: str) -> list[str]:
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def _sessions(text: str) -> Iterator[tuple[str, str]]:
    """Yield every command after "$ " with the text up to the next one."""
    for session in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = session.partition("\n")
        yield command, expected


def _fits(output: str, expected: str) -> bool:
    """Return whether the texts agree; white space is ignored and "..." stands for any text."""
    pattern = ".*".join(re.escape(part) for part in _one_line(expected).split("..."))
    return re.fullmatch(pattern, _one_line(output)) is not None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _run(command: str, workspace: Path, exports: ExportsOnce) -> tuple[int, str]:
    """Run one command line; return its exit code and what it printed."""
    words = shlex.split(command, comments=True)
    in_shell = bool(_SHELL_SYNTAX.search(re.sub(r'"[^"]*"|&&.*|#.*', "", command)))
    if words[0].startswith(("scripts/", "lab/")) or (words[0] in _NOT_HERE and not in_shell):
        _check_names(command, words)
        return 0, ""
    if words[0] == "dsbd-export":
        return exports.run(words[1:])
    if words[0] == "dsbd-serve" or words[:2] == ["serve", "run"]:
        with _running(command):
            return 0, ""
    words += _QUICK.get(words[0], [])
    environment = {"XDG_CACHE_HOME": str(workspace / "cache"), "RAY_ADDRESS": "local"}
    if words[0] in _COMMANDS and not in_shell and not _OWN_PROCESS & set(words):
        return _invoke(_COMMANDS[words[0]], words[1:], environment)
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env={**os.environ, **environment, "PATH": scripts},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return process.returncode, process.stdout + process.stderr


def _invoke(
    command: click.Command, arguments: list[str], environment: dict[str, str] | None = None
) -> tuple[int, str]:
    done = CliRunner(env=environment).invoke(command, arguments, input="def read(path):")
    return done.exit_code, done.output


def _check_names(command: str, words: list[str]) -> None:
    """Check what can be checked of a command that installs or takes long: its names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"(?:\.|dsbd-ort)\[([\w,-]+)\]", command):
        assert set(extras.split(",")) <= set(project["optional-dependencies"]), command
    for pin in re.findall(r"torch==\S+", command):
        assert pin in (ROOT / "constraints.txt").read_text().split(), command
    if words[0].startswith(("scripts/", "lab/")):
        assert os.access(ROOT / words[0], os.X_OK), f"{command}: no such script"
        options = {word for word in words if word.startswith("--")} - {"--help"}
        text = "".join(file.read_text() for file in _sources(words))
        assert all(f'"{option}"' in text for option in options), command
    for word in words[1:]:
        if word.startswith("tests/"):
            file, _, name = word.partition("::")
            assert (ROOT / file).exists(), f"{command}: no {file}"
            assert not name or f"def {name}(" in (ROOT / file).read_text(), f"{command}: no {name}"


def _sources(words: list[str]) -> list[Path]:
    """Return the files that say which options a script or a measurement takes."""
    script = ROOT / words[0]
    if words[0] != "lab/run" or not words[1:]:
        return [script]
    module = script.with_name(words[1].replace("-", "_"))
    files = [*module.glob("*.py"), *module.parent.glob(f"{module.name}.py")]
    assert files, f"{' '.join(words)}: no such measurement"
    return [*files, script.parent / "frame" / "page.py"]
