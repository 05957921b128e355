"""Bundles of every family and option, for lab.gpu.families: tiny random checkpoints, exported.

Needs the packages of the export. Existing bundles are kept. A refused export leaves its reason.
"""

import argparse
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsbd_errors import DsbdError
from dsbd_export.config import ExportConfig
from dsbd_export.model_source import SourceOf
from dsbd_export.opening import source_of
from dsbd_export.pipeline import export_bundle
from lab.gpu.runner import write_json
from lab.gpu.settings import WEBGPU
from scripts.family_checkpoints import (
    CONVOLUTIONAL,
    FAMILY_CHECKPOINTS,
    ONE_OF_EACH,
    RECURRENT,
    write_family_checkpoint,
)
from scripts.shared_captures import SharedCaptures

CASE_NAME = "case.json"
_OPTIONS: tuple[Mapping[str, Any], ...] = (
    {"dtype": "bf16"},
    {"dtype": "fp32", "attention": "grouped"},
    {"dtype": "fp16", "attention": "grouped"},
    {"dtype": "fp32", "attention": "exact"},
    {"dtype": "fp16", "form": "cuda"},
    {"dtype": "fp16", "form": "cuda", "attention": "grouped", "quantize": "int4"},
    {"dtype": "fp32", "quantize": "int8-blocks"},
    {"dtype": "fp16", "quantize": "int8-blocks"},
    {"dtype": "fp32", "quantize": "int4"},
    {"dtype": "fp16", "quantize": "int4"},
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One export of a family's checkpoint; ``options``: further options of ExportConfig."""

    family: str
    dtype: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join([self.family, self.dtype, *map(str, self.options.values())])


def cases(provider: str) -> list[Case]:
    """Return one variant of every family in fp16 and fp32, and a Llama with every option.

    For WebGPU: only fp32 and only its form.
    """
    names = [name for name in ONE_OF_EACH if name not in (*RECURRENT, *CONVOLUTIONAL)]
    if provider == WEBGPU:
        all_cases = [Case(family=name, dtype="fp32", options={"form": WEBGPU}) for name in names]
        for other in ({"quantize": "int4"}, {"attention": "exact"}):
            all_cases.append(Case(family="llama", dtype="fp32", options={"form": WEBGPU, **other}))
        return all_cases
    all_cases = [Case(family=name, dtype=dtype) for dtype in ("fp16", "fp32") for name in names]
    for options in _OPTIONS:
        others = {key: value for key, value in options.items() if key != "dtype"}
        all_cases.append(Case(family="llama", dtype=options["dtype"], options=others))
    return all_cases


def export_case(case: Case, folder: Path, source: SourceOf = source_of) -> Path:
    """Export a case into a folder of its own in ``folder``, unless it is there; return the folder.

    It has case.json (case, dtype, and the reason of a refusal) and the bundle's target.
    """
    place = folder / case.name.replace(" ", "_")
    if (place / CASE_NAME).exists():
        return place
    is_exact = case.dtype == "fp32" and "quantize" not in case.options
    shutil.rmtree(place, ignore_errors=True)
    config = ExportConfig(
        target=str(write_family_checkpoint(case.family, place / "checkpoint")),
        output=place / "bundle",
        dtype=case.dtype,
        max_kl=None if is_exact else 1e3,  # tiny random weights quantize badly
        max_context=FAMILY_CHECKPOINTS[case.family].max_context,
        **case.options,
    )
    reason = ""
    try:
        export_bundle(config, report=lambda _line: None, source_of=source)
    except DsbdError as error:
        reason = str(error)
    shutil.rmtree(place / "checkpoint")
    write_json(place / CASE_NAME, {"case": case.name, "dtype": case.dtype, "reason": reason})
    return place


def main() -> None:
    """Export the cases of a provider into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--provider", required=True)
    options = parser.parse_args()
    captures = SharedCaptures()
    for case in cases(options.provider):
        print(export_case(case, options.folder, captures).name, flush=True)


if __name__ == "__main__":
    main()
