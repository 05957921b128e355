"""Check of a machine with a GPU: install, export, compare with the CPU, measure.

Needs no network: --prepare, on another machine, downloads, builds and trains what the pieces need,
and packs it into WORK/parts; --parts unpacks it. Pieces that an earlier run answered are left out;
--all runs them too. Every piece writes its result to WORK/gpu.json; a second call continues with
the pieces that are not done. Exit code 0: all pieces are done or not applicable; 1: a piece failed
or is not done; 2: requirements are missing (one line each).
"""

import argparse
import sys
from pathlib import Path

from lab.gpu.environment import missing_requirements
from lab.gpu.pieces import TABLE, TABLES_NAME, pieces
from lab.gpu.preparation import preparing_pieces, unpack
from lab.gpu.runner import PieceError
from lab.gpu.schedule import chosen, run_pieces
from lab.gpu.settings import EXTRA_BY_PROVIDER, ROOT, Settings


def main(arguments: list[str] | None = None, prog_name: str | None = None) -> int:
    """Run the chosen pieces; return the exit code."""
    options = vars(_parser(prog_name).parse_args(arguments))
    only, is_list, is_all = (options.pop(name) for name in ("only", "list", "all"))
    parts, is_preparing = options.pop("parts"), options.pop("prepare")
    try:
        if parts is not None:
            unpack(parts, options["work"])
    except PieceError as error:
        print(error, file=sys.stderr)
        return 2
    if options["wheels"] is None and parts is not None:
        options["wheels"] = options["work"] / "wheels"
    settings = Settings(**{**options, "bundles": tuple(options["bundles"])})
    every = preparing_pieces(settings) if is_preparing else pieces(settings)
    wanted = chosen(every, only, is_all)
    if is_list or not wanted:
        names = "\n".join(piece.name for piece in (wanted or every))
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


def _parser(prog_name: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog_name, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work", type=_path, default=ROOT / "build" / "gpu", help="folder for all results")
    add("--prepare", action="store_true", help="prepare WORK/parts instead; takes an hour or two")
    add("--parts", type=_path, help="folder with the prepared parts, unpacked to WORK")
    add(
        "--wheels",
        type=_path,
        help="folder with wheels [with --parts WORK/wheels]; else this Python",
    )
    add("--site-packages", type=_path, help="packages without wheels, used after those of --wheels")
    add("--bundle", type=_path, action="append", default=[], dest="bundles",
        help="a bundle exported elsewhere, instead of exports here; may be repeated")  # fmt: skip
    add("--provider", choices=EXTRA_BY_PROVIDER, default="cuda", help="execution provider to check")
    add("--params", default="1B", help="parameters of the twin; trained: no twin")
    add("--draft-minutes", type=float, default=20.0, help="of --prepare, for each draft")
    add("--python-of-wheels", type=Path, default=Path("python3.12"), help="of --prepare")
    add("--dtype", choices=("fp16", "bf16", "fp32"), default="fp16", help="precision of the twin")
    add("--only", action="append", default=[], help="a piece, or a pattern such as 'bench-*'")
    add("--all", action="store_true", help="also the pieces that an earlier run answered")
    add("--list", action="store_true", help="print the names of the pieces")
    add("--max-new-tokens", type=int, default=64)
    add("--repetitions", type=int, default=2)
    add("--num-prompts", type=int, default=6)
    add("--limit-s", type=float, default=540.0, help="seconds for this call of the command")
    add("--document", type=_path, default=ROOT / "lab" / "results" / "gpu.md")
    return parser


def _path(text: str) -> Path:
    return Path(text).resolve()
