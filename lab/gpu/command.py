"""Check of a machine with a GPU: install, export, compare with the CPU, measure.

Needs no network: packages are installed from --wheels, a folder of wheels, complete or split into
parts (NAME.whl.part-00, part-01, ...). Every piece writes its result to --work; a second call
continues with the pieces that are not done. Exit code 0: all pieces are done or not applicable; 1:
a piece failed or is not done; 2: requirements are missing (one line each).
"""

import argparse
import sys
from pathlib import Path

from lab.gpu.environment import missing_requirements
from lab.gpu.pieces import TABLE, TABLES_NAME, pieces
from lab.gpu.schedule import chosen, run_pieces
from lab.gpu.settings import (
    CUDA_FORM_SUFFIX,
    EXTRA_BY_PROVIDER,
    INT4_SUFFIX,
    ROOT,
    Settings,
)

_SEVERAL = ("bundles", "variants")


def main(arguments: list[str] | None = None, prog_name: str | None = None) -> int:
    """Run the chosen pieces; return the exit code."""
    options = vars(_parser(prog_name).parse_args(arguments))
    only, is_list = options.pop("only"), options.pop("list")
    settings = Settings(**{**options, **{key: tuple(options[key]) for key in _SEVERAL}})
    if problem := _wrong_variant(settings):
        print(problem, file=sys.stderr)
        return 2
    wanted = chosen(pieces(settings), only)
    if is_list or not wanted:
        names = "\n".join(piece.name for piece in pieces(settings))
        print(names if is_list else f"--only {' '.join(only)} names no piece of:\n{names}")
        return 0 if is_list else 2
    lacking = missing_requirements(settings) if any(piece.needs_gpu for piece in wanted) else []
    for line in lacking:
        print(line, file=sys.stderr)
    if lacking:
        return 2
    settings.work.mkdir(parents=True, exist_ok=True)
    is_complete = run_pieces(wanted, settings, report=lambda line: print(line, flush=True))
    tables = settings.work / TABLES_NAME
    if any(piece.name == TABLE for piece in wanted) and tables.exists():
        print(tables.read_text(encoding="utf-8"))
    return 0 if is_complete else 1


def _wrong_variant(settings: Settings) -> str | None:
    """Return an error for the first variant that matches no bundle, None if all match."""
    expected = [
        bundle.name + suffix
        for bundle in settings.bundles
        for suffix in (CUDA_FORM_SUFFIX, INT4_SUFFIX)
    ]
    wrong = next((each for each in settings.variants if each.name not in expected), None)
    if wrong is None:
        return None
    names = " or ".join(expected) or "nothing, as no --bundle is given"
    return f"--variant {wrong} is compared with no bundle; expected the name {names}"


def _parser(prog_name: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog_name, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work", type=_path, default=ROOT / "build" / "gpu", help="folder for all results")
    add("--wheels", type=_path, help="folder with wheels [use the packages of this Python]")
    add("--site-packages", type=_path, help="packages without wheels, used after those of --wheels")
    add("--bundle", type=_path, action="append", default=[], dest="bundles",
        help="a bundle exported elsewhere, instead of exports here; may be repeated")  # fmt: skip
    add("--variant", type=_path, action="append", default=[], dest="variants",
        help="a --bundle's target with other export options: NAME-cuda or NAME-int4")  # fmt: skip
    add("--provider", choices=EXTRA_BY_PROVIDER, default="cuda", help="execution provider to check")
    add("--params", default="1B", help="parameters of the exported twin")
    add("--dtype", choices=("fp16", "bf16", "fp32"), default="fp16", help="precision of the twin")
    add("--only", action="append", default=[], help="a piece, or a pattern such as 'bench-*'")
    add("--list", action="store_true", help="print the names of the pieces")
    add("--max-new-tokens", type=int, default=64)
    add("--repetitions", type=int, default=3)
    add("--num-prompts", type=int, default=8)
    add("--limit-s", type=float, default=480.0, help="seconds for this call of the command")
    add("--document", type=_path, default=ROOT / "lab" / "results" / "gpu.md")
    return parser


def _path(text: str) -> Path:
    return Path(text).resolve()
