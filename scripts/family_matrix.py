"""A tiny random checkpoint of a family, exported in one of several precisions.

An export must pass the whole parity gate of dsbd-export. An export with exact attention also
computes a path in many ways, and all logits must have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_checkpoint
from dsbd_export.pipeline import export_model
from dsbd_export.tensorrt.tensorrt_build import build_model_engines
from dsbd_export.tensorrt.tensorrt_options import MIN_CAPACITY, TensorrtOptions, build_place
from dsbd_runtime.bundle_files.bundle import MODEL_FILE
from dsbd_runtime.errors import DsbdError
from scripts.family_checkpoints import FAMILY_CHECKPOINTS
from scripts.path_ways import PathEngine, count_differing
from scripts.shared_captures import SharedCaptures

PRECISIONS = {  # column: (dtype, quantize, attention)
    "fp32 error": ("fp32", "none", "fused"),
    "exact fp32 error": ("fp32", "none", "exact"),
    "fp16 KL": ("fp16", "none", "fused"),
    "int8 KL": ("fp32", "int8", "exact"),
    "int4 KL": ("fp32", "int4", "exact"),
}
ENGINE_COLUMN = "TensorRT fp16"
_NUM_TOKENS, _NUM_WAYS = (
    90,
    16,
)  # tokens of the path, and ways in which every bit-exact engine computes it
_ENGINE = TensorrtOptions(engine="tensorrt-rtx", compute_capability="12.0", capacity=MIN_CAPACITY)
_NO_LIMIT = (
    1e3  # tiny random weights quantize badly: int4 is only reported here and checked elsewhere
)


@dataclass(frozen=True)
class Failure:
    """A missing result and the reason for it."""

    reason: str

    @property
    def is_for_want_of_exact_attention(self) -> bool:
        """Return whether only exact attention is refused."""
        return "use attention='fused'" in self.reason


def export_in(
    column: str, name: str, checkpoint: Path, folder: Path, captures: SharedCaptures
) -> float | Failure:
    """Export a checkpoint in one precision into a new folder, and return its parity.

    Parity is the largest logit error in fp32, the mean KL in other precisions.
    """
    dtype, quantize, attention = PRECISIONS[column]
    options = ExportConfig(
        target="",
        draft="",
        output=folder,
        dtype=dtype,
        quantize=quantize,
        attention=attention,
        max_kl=_NO_LIMIT if quantize == "int4" else None,
        max_context=FAMILY_CHECKPOINTS[name].max_context,
    )
    folder.mkdir()
    try:
        opened = open_checkpoint("target", checkpoint, options)
        entry = export_model(opened, folder, options, lambda _line: None, captures)
    except ExportError as error:
        return Failure(str(error))
    if entry.bit_exact:
        engine = PathEngine(folder / "target" / MODEL_FILE, entry)
        counts = count_differing(engine, num_tokens=_NUM_TOKENS, num_ways=_NUM_WAYS)
        if num := counts.num_other_ways:
            return Failure(f"{num} of {_NUM_WAYS} ways to compute a path give other logits")
    parity = entry.parity
    return parity.max_abs_error if options.is_exact else parity.mean_kl


def build_engines_of(folder: Path) -> str | Failure:
    """Build the engines of the model and its prune graph; return the form of attention."""
    try:
        return build_model_engines(folder, build_place(_ENGINE), MIN_CAPACITY).attention
    except DsbdError as error:
        return Failure(str(error))
