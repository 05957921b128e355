"""Measurements of a draft: a record made by its training, and an agreement made by its export.

dsbd-distill writes the record to the folder of the draft. The export copies it next to the draft's
engine; the manifest lists it like every file. The record is only shown to people.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from dsbd_runtime.typed_json import json_from_file, mismatch, typed

RECORD_FILE = "dsbd_distill.json"


@dataclass(frozen=True, kw_only=True)
class DraftAgreement:
    """How well a draft predicts the greedy answers of its target; means over ``num_tokens``.

    best: share of places where the draft's most probable token is the target's.
    overlap: sum of min(p, q) over the vocabulary, at temperature 1.
    best_four: share of places where the target's token is among the draft's four best.
    """

    num_tokens: int
    best: float
    overlap: float
    best_four: float

    def check(self, where: str) -> None:
        """Raise BundleError unless the means are shares."""
        for name in ("best", "overlap", "best_four"):
            if not 0.0 <= (share := getattr(self, name)) <= 1.0:
                raise mismatch("a number from 0 to 1", share, f"{where}: {name}")


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One measurement during the training.

    step, seconds: training steps and time so far.
    loss: mean loss of the steps since the previous point; None before the first step.
    acceptance: acceptance on a part of the held-out prompts.
    """

    step: int
    seconds: float
    loss: float | None
    acceptance: float


@dataclass(frozen=True, kw_only=True)
class ExpectedSpeed:
    """Expected speedup by the draft at one width, from the costs of the exported engines' calls.

    num_beams: 1: ``speculative`` against ``sample``; else ``dsbd`` against ``beam-sample``.
    is_greedy: True: without sampling, ``speculative-beam-search``.
    tokens_per_iteration: committed layers per iteration, mean over the held-out prompts.
    speedup: speedup per token, without prompt and host time.
    """

    num_beams: int
    tokens_per_iteration: float
    speedup: float
    is_greedy: bool = False


@dataclass(frozen=True, kw_only=True)
class DraftRecord:
    """Training and measurements of a draft.

    Attributes:
        acceptance: probability that a drafted token is accepted (Leviathan et al. 2023, 3.2): the
            sum of min(p, q) over the vocabulary, averaged over the positions of texts that the
            target samples after held-out prompts. Both models use ``temperature``, ``top_k`` and
            ``top_p``.
        acceptance_error: standard error of ``acceptance``, over prompts.
        acceptance_by_depth: for a feature draft, which computes the features of drafted tokens
            itself: acceptance of the first drafted token, of the second, and so on. None: equal.
        top_p: 1: all tokens of ``top_k``.
        are_chats: whether the held-out prompts are chats.
        are_sources: whether the held-out prompts are sources of an encoder-decoder; only its
            decoder's parameters are then counted.
        greedy_acceptance: share of places where both models have the same most probable token.
        coverage: mean share of the target's ``coverage_beams`` most probable tokens that are among
            the draft's ``coverage_beams`` most probable tokens.
        num_train_prompts: number of chats in the training.
        curve: measurements; the first is before the first step.
        minutes: training time of all processes together.
        speeds: one for each width; empty if not measured.
        measured_on: precision and provider of ``speeds``, None without speeds.
    """

    target: str
    num_parameters: int
    num_target_parameters: int
    acceptance: float
    acceptance_error: float
    temperature: float
    top_k: int
    seed: int
    steps: int
    minutes: float
    num_train_tokens: int
    num_held_out_tokens: int
    curve: list[CurvePoint]
    speeds: list[ExpectedSpeed]
    measured_on: str | None
    acceptance_by_depth: list[float] | None = None
    top_p: float = 1.0
    are_chats: bool = False
    are_sources: bool = False
    greedy_acceptance: float | None = None
    coverage: float | None = None
    coverage_beams: int | None = None
    num_proposed_tokens: int | None = None
    num_train_prompts: int = 0


def read_record(file: Path) -> DraftRecord:
    """Read and check a record; raise BundleError naming the place of the first mismatch."""
    return typed(DraftRecord, json_from_file(file), str(file))


def write_record(folder: Path, record: DraftRecord) -> None:
    """Write the record into the folder of a draft."""
    text = json.dumps(dataclasses.asdict(record), indent=2, allow_nan=False)
    (folder / RECORD_FILE).write_text(text + "\n", encoding="utf-8")
