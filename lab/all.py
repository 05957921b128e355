"""All tables of one day: the measurements whose inputs are there, until the time is over.

In WORK lie the bundles: those of lab/run speed, which makes them, pair (lab/run real-pair export),
real_model (lab/run real-model), long (see lab/run long-context) and whisper (a checkpoint of
transformers). A measurement starts if its inputs are there and its minutes are left. WORK/all.md
lists what ran, with its minutes, and what was left out, with the reason: docs/ must not quote the
latter as new.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from lab.frame.page import ROOT
from scripts.document_sections import table

COLUMNS = "measurement", "result", "minutes"


@dataclass(frozen=True)
class Measurement:
    """A command line of lab/run.

    minutes: an estimate for two cores, which only decides what is started.
    needs: files of the work folder.
    """

    arguments: str
    minutes: int
    needs: tuple[str, ...] = ()


_INT8, _FP32 = "speed/bundle-150M-int8-demo", "speed/bundle-150M-none-demo"
_TWIN = "--quantize none --quantize int8 --work speed"
_PEERS = "peers --speed speed --work peers --num-prompts"
MEASUREMENTS = (  # what docs/ quotes most comes first; as large as the tables are
    Measurement("real-pair calls pair", 2, ("pair",)),
    Measurement("real-pair requests pair", 60, ("pair",)),
    Measurement("real-pair quality pair", 100, ("pair",)),
    Measurement(f"speed --params 150M --num-prompts 4 --repetitions 4 {_TWIN}", 15),
    Measurement(f"speed --params 1B --num-prompts 2 --repetitions 3 {_TWIN}", 15),
    Measurement(f"loops --bundle {_INT8}", 10, (_INT8,)),
    Measurement(f"host-time {_INT8}", 3, (_INT8,)),
    Measurement(f"calls {_INT8} {_FP32}", 10, (_INT8, _FP32)),
    Measurement(f"serving {_INT8} {_FP32} --rounds 4", 6, (_INT8, _FP32)),
    Measurement(f"retrieval {_INT8} {_FP32}", 30, (_INT8, _FP32)),
    Measurement("long-context long", 5, ("long",)),
    Measurement(f"{_PEERS} 4 --rounds 2", 15, (_INT8, _FP32)),
    Measurement(f"{_PEERS} 3 --rounds 2 --compare schemas --max-new-tokens 96", 10, (_INT8, _FP32)),
    Measurement(f"{_PEERS} 2 --rounds 1 --compare retrieval --width 64", 5, (_INT8, _FP32)),
    Measurement("real-pair peers pair", 60, ("pair",)),
    Measurement("real-model --work real_model --stage speed", 60, ("real_model",)),
    Measurement("transcription whisper --work transcription", 30, ("whisper",)),
    Measurement("constraints", 3),
)


def run_all(
    measurements: Sequence[Measurement], work: Path, minutes: float, command: Sequence[str]
) -> list[tuple[str, str, str]]:
    """Run what can be run, each as ``command`` with its arguments; return a row for each."""
    rows, end = [], time.monotonic() + 60 * minutes
    for each in measurements:
        missing = [name for name in each.needs if not (work / name).exists()]
        left = (end - time.monotonic()) / 60
        taken = ""
        if missing:
            result = f"left out: {', '.join(missing)} is not in {work}"
        elif left < each.minutes:
            result = f"left out: takes about {each.minutes} minutes, {max(left, 0.0):.0f} are left"
        else:
            began = time.monotonic()
            code = subprocess.run([*command, *each.arguments.split()], cwd=work).returncode
            result = f"failed with exit code {code}" if code else "ran"
            taken = f"{(time.monotonic() - began) / 60:.1f}"
        rows.append((each.arguments, result, taken))
        (work / "all.md").write_text("\n".join(table(COLUMNS, rows)) + "\n", encoding="utf-8")
    return rows


@click.command(help=__doc__)
@click.argument("work", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--minutes", type=float, default=120.0, show_default=True)
@click.option("--only", multiple=True, help="Entries [all].")
def main(work: Path, minutes: float, only: tuple[str, ...]) -> None:
    """Run the measurements and list them."""
    chosen = [each for each in MEASUREMENTS if not only or each.arguments.split()[0] in only]
    rows = run_all(chosen, work, minutes, [sys.executable, str(ROOT / "lab" / "run")])
    click.echo("\n".join(table(COLUMNS, rows)))
    if any(result.startswith("failed") for _, result, _ in rows):
        raise SystemExit(1)
