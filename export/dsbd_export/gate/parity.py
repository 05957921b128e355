"""Parity gate: compares the exported files on ONNX Runtime with the checkpoint, value by value.

In fp32 every logit must be right up to rounding: its error must be within a fixed limit. For a
model with large activations the limit is a small multiple of the error of the checkpoint's own
fp32, measured in float64 on the same rows. A lower precision or quantized weights are judged by the
mean KL divergence. Its limit for a real text depends on the precision. The limit for forests is
looser, because forests only show whether masks and positions are right. The share of rows with the
same most probable token is reported but not limited: rounding decides near-ties.

An engine that gives other tokens or NaN computes something else: its files are deleted. A bundle
with smaller errors beyond a limit is kept under another name, for a person to accept
(``refused_bundle``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.config import ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity_engine import check_prune, parity_engine
from dsbd_export.parity_cases import DECODE, PREFILL, TEXT, ForestCase, Reference, differences
from dsbd_export.progress import Counter, Report, counted, silent
from dsbd_runtime.bundle_files.bundle import Bundle, ParityCase, ParityReport

MAX_ABS_ERROR = "max_abs_error"
MEAN_KL = "mean_kl"

_EXACT_LIMIT = 1e-4  # rounding in fp32 stays below 2e-5 on the demo pair
_ROUNDING_FACTOR = (
    4  # error of an engine, whose sums have another order, relative to the checkpoint's
)
_MOST_ROUNDING = 1e-3  # largest error of the checkpoint's fp32 that is explained by rounding

# By (dtype, quantize): limit of the mean KL divergence of the text, in nats. The comments have two
# measurements: the demo pair (the larger of target and draft), and the worst of the tiny random
# mixtures of experts, whose routers amplify rounding more than any other tried model.
_KL_LIMITS = {
    ("fp32", "none"): 1e-2,  # 4.3e-6, 4.3e-3; for sums of integers, for WebGPU
    ("fp16", "none"): 2e-3,  # 1.2e-6, 5.6e-4
    ("bf16", "none"): 1e-2,  # 5.7e-5, 3.6e-3; only weights are in bf16, see ``fp32_twin``
    ("fp32", "int8-dynamic"): 5e-2,  # 1.3e-3, 2.0e-2
    ("fp32", "int8"): 2e-2,  # 7.0e-4
    ("fp16", "int8"): 2e-2,
    ("fp32", "int4"): 3e-1,  # 6.3e-2, 2.4e-1
    ("fp16", "int4"): 3e-1,  # 6.4e-2
}
# By quantize: the mean KL divergence of the text above which a more precise form is recommended,
# and that form. SmolLM2-135M-Instruct has 4e-3 to 7e-3 in int8-dynamic, 4.7e-3 in int8.
_NEARER = {
    "int8-dynamic": (1e-2, "--quantize int8-blocks (weights alone), or none"),
    "int8": (1e-2, "fp32 or fp16 without --quantize"),
    "int4": (1e-1, "--quantize int8"),
}
# Random tokens have larger divergences than text, up to 6 times on the demo pair. Their limit is
# meant for structural errors such as a wrong mask or position, which show in cases of several rows.
# A single row has no limit: SmolLM2-135M in int4 has 1.7 after a token that begins none of its
# texts.
_FOREST_FACTOR = 10
_HIGHEST_FOREST_LIMIT = 1.0


InFloat64 = Callable[[Sequence[ForestCase]], Iterable[NDArray[np.float64]]]
"""Yields the checkpoint's logits for some cases, each computed in float64 when it is needed."""


# Errors beyond the limit that a person may accept. In fp32: a divergence as if all logits had
# errors of 1e-2, and the same most probable tokens except in a few rows of the long text. In other
# precisions: most tokens of the text are the checkpoint's.
_HIGHEST_EXACT_KL = 1e-4
_LEAST_EXACT_AGREEMENT = 0.99
_LEAST_AGREEMENT = 0.5


def measured_parity(
    bundle: Bundle,
    checkpoint: Checkpoint,
    references: Sequence[Reference],
    limit: ParityLimit,
    in_float64: InFloat64 | None = None,
    report: Report = silent,
) -> ParityReport:
    """Run every case on the engine of a bundle, then its prune.onnx; return the errors found.

    in_float64: computes the checkpoint in float64, to decide whether a larger error is rounding.
        Used if the limit is for the largest error.

    Raises ExportError if a case computes something else than the checkpoint (NaN, other tokens), or
    if prune.onnx moves a row wrongly.
    """
    cases = _checked_cases(bundle, checkpoint, references, report)
    is_missed = not all(map(limit.admits, cases))
    if is_missed and in_float64 is not None and limit.measure == MAX_ABS_ERROR:
        limit = _limit_by_rounding(references, cases, limit, in_float64)
    for result in cases:
        if not limit.admits(result) and _is_other_computation(result, limit):
            raise ExportError(
                f"{_difference(checkpoint, limit, result)}; rounding cannot explain that (KL "
                f"{result.mean_kl:.3g}, the same most probable token in "
                f"{result.top1_agreement:.1%} of the rows): this model is not supported in this "
                "precision; in fp32 its family is not"
            )
    summary = [case for case in cases if case.name == TEXT] or cases
    return ParityReport(
        measure=limit.measure,
        limit=limit.value,
        max_abs_error=max(case.max_abs_error for case in cases),
        mean_kl=float(np.mean([case.mean_kl for case in summary])),
        top1_agreement=float(np.mean([case.top1_agreement for case in summary])),
        cases=cases,
    )


def _checked_cases(
    bundle: Bundle, checkpoint: Checkpoint, references: Sequence[Reference], report: Report
) -> list[ParityCase]:
    cases = []
    counter = Counter(f"{checkpoint.role}: comparing with the checkpoint", "cases", report)
    with parity_engine(bundle, checkpoint.role) as engine:
        for reference in counted(references, counter):
            case = reference.case
            measured = divergence(engine.logits(case), reference.logits)
            length = case.prompt_length
            cases.append(ParityCase(name=case.name, prompt_length=length, **vars(measured)))
    check_prune(bundle, checkpoint)
    return cases


def _limit_by_rounding(
    references: Sequence[Reference],
    results: Sequence[ParityCase],
    limit: ParityLimit,
    in_float64: InFloat64,
) -> ParityLimit:
    """Return the limit that errors by rounding alone do not exceed, at least ``limit``.

    If the checkpoint's fp32 differs from float64 by e, an engine may differ by ``_ROUNDING_FACTOR``
    e. Float64 is slow, so cases are computed only until all are admitted.
    """
    missed = [result for result in results if not limit.admits(result)]
    judged = [
        (reference, result)
        for reference, result in zip(references, results, strict=True)
        if result.name == TEXT or result in missed
    ]
    judged.sort(key=lambda pair: (pair[1].name != TEXT, -limit.error_of(pair[1])))
    widened = limit
    exact = in_float64([reference.case for reference, _ in judged])
    for (reference, _), logits in zip(judged, exact, strict=False):
        rounding = float(differences(reference.logits, logits).max())
        if not rounding <= _MOST_ROUNDING:  # also when it is NaN
            return limit
        widened = replace(widened, value=max(widened.value, (_ROUNDING_FACTOR + 1) * rounding))
        if all(map(widened.admits, missed)):
            break
    return widened


def refusal(checkpoint: Checkpoint, report: ParityReport) -> str | None:
    """Return how far the worst case exceeds the limit of its report, None if all are within it."""
    limit = ParityLimit(report.measure, report.limit)
    refused = [case for case in report.cases if not limit.admits(case)]
    if not refused:
        return None
    return _difference(checkpoint, limit, max(refused, key=limit.needed_by))


def advice(checkpoint: Checkpoint, config: ModelOptions, report: ParityReport) -> str | None:
    """Return advice to use a more precise form if an admitted model differs much, else None."""
    if config.quantization not in _NEARER or report.measure != MEAN_KL:
        return None
    noticeable, nearer = _NEARER[config.quantization]
    if report.mean_kl <= noticeable:
        return None
    return (
        f"the {checkpoint.role} in {config.quantize} differs from the checkpoint by a KL "
        f"divergence of {report.mean_kl:.2g} (the most probable token is the same in "
        f"{report.top1_agreement:.0%} of the text), good models stay below {noticeable:g}: its "
        f"answers may suffer; nearer is {nearer}"
    )


def _difference(checkpoint: Checkpoint, limit: ParityLimit, result: ParityCase) -> str:
    return (
        f"parity failed: the {checkpoint.role} (family {checkpoint.family}) differs from the "
        f"checkpoint by {limit.error_of(result):.3g} ({limit.measure}) in case {result.name} after "
        f"{result.prompt_length} tokens, the limit is {limit.of_case(result):.3g}"
    )


def _is_other_computation(result: ParityCase, limit: ParityLimit) -> bool:
    """Return whether a case beyond its limit is more than a person may accept."""
    error = limit.error_of(result)
    if not np.isfinite(error):
        return True
    is_text = result.name == TEXT
    if limit.measure == MAX_ABS_ERROR:
        least = _LEAST_EXACT_AGREEMENT if is_text else 1.0
        return result.top1_agreement < least or result.mean_kl > _HIGHEST_EXACT_KL
    return error > _HIGHEST_FOREST_LIMIT or (is_text and result.top1_agreement < _LEAST_AGREEMENT)


@dataclass(frozen=True)
class Divergence:
    """Differences of R rows; infinite and without agreement if the shapes differ."""

    max_abs_error: float  # largest difference of a logit; NaN if a logit is NaN
    mean_kl: float  # mean of KL(wanted || found) over the rows, in nats; NaN if a logit is NaN
    top1_agreement: float  # share of rows with the same most probable token


def divergence(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> Divergence:
    """Return the differences of the logits ``found`` from ``wanted``, (R, V) each."""
    if found.shape != wanted.shape:
        return Divergence(float("inf"), float("inf"), 0.0)
    return Divergence(
        max_abs_error=max(
            float(differences(a, b).max()) for a, b in zip(found, wanted, strict=True)
        ),
        mean_kl=float(np.mean([_kl(p, q) for p, q in zip(wanted, found, strict=True)])),
        top1_agreement=float(np.mean(found.argmax(-1) == wanted.argmax(-1))),
    )


def _kl(p_logits: NDArray[np.float32], q_logits: NDArray[np.float32]) -> float:
    """Return KL(p || q), at least 0, for two rows of logits, (V,) each; one row saves memory."""
    is_possible = p_logits != -np.inf
    p, q = _log_probs(p_logits)[is_possible], _log_probs(q_logits)[is_possible]
    return float(np.maximum(np.sum(np.exp(p) * (p - q)), 0.0))


def _log_probs(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - np.max(logits)
    return np.asarray(shifted - np.log(np.sum(np.exp(shifted))))


@dataclass(frozen=True)
class ParityLimit:
    """Limit for the errors of all cases."""

    measure: str
    value: float  # largest admitted error: of the text, or with ``MAX_ABS_ERROR`` of any case

    def error_of(self, result: ParityCase) -> float:
        return float(getattr(result, self.measure))

    def of_case(self, result: ParityCase) -> float:
        """Return the largest admitted error of a case; infinite for a mean over a single row."""
        if result.name == TEXT or self.measure == MAX_ABS_ERROR:
            return self.value
        if result.name == DECODE or (result.name == PREFILL and result.prompt_length == 1):
            return math.inf
        return min(self.value * _FOREST_FACTOR, max(self.value, _HIGHEST_FOREST_LIMIT))

    def admits(self, result: ParityCase) -> bool:
        """Return whether a case passes; False if its error is NaN."""
        return self.error_of(result) <= self.of_case(result)

    def needed_by(self, result: ParityCase) -> float:
        """Return the smallest ``value`` that admits a case."""
        error = self.error_of(result)
        if self.measure == MAX_ABS_ERROR or result.name == TEXT or error > _HIGHEST_FOREST_LIMIT:
            return error
        return error / _FOREST_FACTOR


def parity_limit(config: ModelOptions, shared: str = "none") -> ParityLimit:
    """Return the requested limit, or else the limit of the precision.

    shared: quantization of a shared part, whose limit is used if it is larger.
    """
    if config.is_exact and (shared == "none" or config.atol is not None):
        return ParityLimit(MAX_ABS_ERROR, _EXACT_LIMIT if config.atol is None else config.atol)
    forms = (config.quantization, shared)
    limit = max(_KL_LIMITS.get((config.dtype, form), 0.0) for form in forms)
    return ParityLimit(MEAN_KL, limit if config.max_kl is None else config.max_kl)
