"""The result of a benchmark, and the JSON of ``dsbd-bench --json`` (docs/benchmark.md)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dsbd_ort.benchmark.machine import Machine
from dsbd_ort.benchmark.measure import Measurement
from dsbd_ort.benchmark.summary import RunSummary
from dsbd_ort.json_output import json_text

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """An engine of the bundle, from its manifest: family, precision and context."""

    family: str
    dtype: str
    quantization: str
    logits: str
    context_length: int


@dataclass(frozen=True, kw_only=True)
class BundleInfo:
    """The bundle.

    Attributes:
        path: as it was given.
        manifest_sha256: of dsbd.json, which holds the hashes of all other files.
    """

    path: str
    manifest_sha256: str
    target: EngineInfo
    draft: EngineInfo


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """All that a benchmark knows; nested names are those of the dataclasses.

    Attributes:
        schema_version: changes when a name goes or changes its meaning.
        created: when the benchmark began, ISO 8601, UTC.
        versions: by name, of Python and of the packages.
        provider, draft_provider: where the target and the draft ran.
        threads: of both engines; None: ONNX Runtime's choice.
        cuda_graphs: whether calls were captured once and replayed.
        energy_counters: what ``energy_joules`` counts; empty: nothing, and it is null.
        repetitions, seed: what was asked for.
        prompts: ``prompt_index`` points here.
        runs: one summary per run.
        measurements: one per repetition, prompt and run, in the order they were made.
    """

    schema_version: int
    created: str
    bundle: BundleInfo
    machine: Machine
    versions: dict[str, str]
    provider: str
    draft_provider: str
    threads: int | None
    cuda_graphs: bool
    energy_counters: list[str]
    repetitions: int
    seed: int
    prompts: list[str]
    runs: list[RunSummary]
    measurements: list[Measurement]

    def to_json(self) -> str:
        """Return the report as one JSON object; what is not known is null."""
        return json_text(self.to_dict(), indent=1) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return dataclasses.asdict(self)
