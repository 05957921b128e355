"""Every family and option on a provider: differences of a path's logits from the CPU's.

Each tiny random checkpoint is exported here, so this needs the packages of the export. A path is
computed in random ways, which are the same on both providers, with rows of other paths, and prunes
between calls.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dsbd_errors import DsbdError
from dsbd_export.config import ExportConfig
from dsbd_export.model_source import SourceOf
from dsbd_export.opening import source_of
from dsbd_export.pipeline import export_bundle
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.loading import load_causal_lm
from lab.gpu.kinds_of_ways import KINDS, NUM_TOKENS, outputs_of
from lab.gpu.settings import WEBGPU
from scripts.family_checkpoints import (
    CONVOLUTIONAL,
    FAMILY_CHECKPOINTS,
    ONE_OF_EACH,
    RECURRENT,
    write_family_checkpoint,
)

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
_NUM_WAYS = 4
_MOST_WORKERS = 12


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
    """Return one variant of every family in fp32 and fp16, and a Llama with every option.

    For WebGPU: only fp32 and only its form.
    """
    names = [name for name in ONE_OF_EACH if name not in (*RECURRENT, *CONVOLUTIONAL)]
    if provider == WEBGPU:
        all_cases = [Case(family=name, dtype="fp32", options={"form": WEBGPU}) for name in names]
        for other in ({"quantize": "int4"}, {"attention": "exact"}):
            all_cases.append(Case(family="llama", dtype="fp32", options={"form": WEBGPU, **other}))
        return all_cases
    all_cases = [Case(family=name, dtype=dtype) for dtype in ("fp32", "fp16") for name in names]
    for options in _OPTIONS:
        others = {key: value for key, value in options.items() if key != "dtype"}
        all_cases.append(Case(family="llama", dtype=options["dtype"], options=others))
    return all_cases


def difference(case: Case, provider: str, source: SourceOf = source_of) -> dict[str, Any]:
    """Return the largest difference of a logit from the CPU's, or the reason for a failure."""
    result: dict[str, Any] = {"case": case.name, "dtype": case.dtype}
    result |= {"difference": None, "reason": ""}
    with tempfile.TemporaryDirectory() as folder:
        try:
            result["difference"] = _largest_difference(case, provider, Path(folder), source)
        except DsbdError as error:
            result["reason"] = str(error)
    return result


def _largest_difference(case: Case, provider: str, folder: Path, source: SourceOf) -> float:
    is_exact = case.dtype == "fp32" and "quantize" not in case.options
    config = ExportConfig(
        target=str(write_family_checkpoint(case.family, folder / "checkpoint")),
        output=folder / "bundle",
        dtype=case.dtype,
        max_kl=None if is_exact else 1e3,  # tiny random weights quantize badly
        max_context=FAMILY_CHECKPOINTS[case.family].max_context,
        **case.options,
    )
    export_bundle(config, report=lambda _line: None, source_of=source)
    bundle = open_bundle(config.output)
    outputs = []
    for name in ("cpu", provider):
        with load_causal_lm(bundle, "target", provider=name) as model:
            rng = np.random.default_rng(0)
            token_ids = rng.integers(0, model.spec.vocab_size, NUM_TOKENS)
            ways = [(KINDS[1], number == 0) for number in range(_NUM_WAYS)]
            outputs.append(
                [outputs_of(model, token_ids, kind, rng, is_plain=plain) for kind, plain in ways]
            )
    cpu, other = (np.array(each) for each in outputs)
    return float(np.abs(cpu - other).max())


def main() -> None:
    """Print the differences and write them to ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--provider", required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    wanted = cases(options.provider)
    workers = max(min(_MOST_WORKERS, (os.cpu_count() or 1) - 2), 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        results = []
        for each in pool.map(difference, wanted, [options.provider] * len(wanted)):
            print(each["case"], each["difference"], each["reason"], flush=True)
            results.append(each)
    text = json.dumps({"provider": options.provider, "cases": results}, indent=1)
    options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
