"""Content of dsbd.json: typed entries, and the checks of their values against each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsbd_runtime.errors import BundleError
from dsbd_runtime.graph import (
    ATTENTION_MASK,
    ATTENTION_MASK_SLIDING,
    GraphContract,
    KVGeometry,
    head_outputs,
    parse_num_top_logits,
)
from dsbd_runtime.typed_json import in_short, json_from_file, mismatch, typed

SCHEMA_VERSION = 2
MANIFEST_NAME = "dsbd.json"
DTYPES = ("fp32", "fp16", "bf16")
QUANTIZATIONS = ("none", "int8-dynamic", "int8", "int4")
_MOST = 2**31 - 1
_MOST_LAYERS = 10_000
PARITY_MEASURES = ("max_abs_error", "mean_kl")


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """One comparison with the checkpoint: its kind, its prompt length and its differences.

    Attributes:
        max_abs_error: largest difference of a logit.
        mean_kl: mean over the compared rows of KL(checkpoint || engine), in nats.
        top1_agreement: share of the rows whose most probable token is the same.
    """

    name: str
    prompt_length: int
    max_abs_error: float
    mean_kl: float
    top1_agreement: float


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """Differences between engine and checkpoint that the export measured, and their limit.

    Attributes:
        measure: the one of ``PARITY_MEASURES`` that the limit is for.
        limit: the highest value that passes on the text and, of "max_abs_error", on every case; of
            "mean_kl" the forests of random tokens have a looser one.
        max_abs_error: the largest of all cases.
        mean_kl: the mean over the rows of real text, which is a case of its own.
        top1_agreement: the share of the same rows.
    """

    measure: str
    limit: float
    max_abs_error: float
    mean_kl: float
    top1_agreement: float
    cases: list[ParityCase]


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """Manifest entry of one engine: all that a host must know of it.

    Attributes:
        family: ``model_type`` of the checkpoint, for people; nothing depends on it.
        context_length: highest number of positions the model was made for.
        dtype: one of ``DTYPES``, the type of weights that are not quantized.
        quantization: one of ``QUANTIZATIONS``.
        logits: "full", or "topk:K" with K up to the vocabulary; see ``graph``.
        masks: the mask inputs of the graph, a subset of the two names in ``graph``.
        sliding_window: positions a sliding-window layer sees, None without such layers.
    """

    family: str
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    context_length: int
    kv: KVGeometry
    dtype: str
    quantization: str
    logits: str
    masks: list[str]
    sliding_window: int | None
    parity: ParityReport

    @property
    def contract(self) -> GraphContract:
        """The inputs and outputs that its graph must have."""
        head = head_outputs(self.logits, self.vocab_size)
        return GraphContract(kv=self.kv, masks=self.masks, head=head)


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size in bytes and sha256 (hex) of one file of the bundle."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of dsbd.json. ``files`` is keyed by path relative to the bundle."""

    schema_version: int
    versions: dict[str, str]
    target: ModelEntry
    draft: ModelEntry
    files: dict[str, FileEntry]


def manifest_from_file(file: Path) -> Manifest:
    """Read and check dsbd.json; raise BundleError naming the place of the first mismatch."""
    data = json_from_file(file)
    found = data.get("schema_version") if isinstance(data, dict) else None
    if type(found) is not int or found != SCHEMA_VERSION:
        raise BundleError(
            f"{file} has schema_version {in_short(found)}, this version reads {SCHEMA_VERSION}; "
            "export the bundle again with this version of dsbd-ort"
        )
    manifest = typed(Manifest, data, str(file))
    check_entry(manifest.target, f"{file}: target")
    check_entry(manifest.draft, f"{file}: draft")
    return manifest


def check_entry(entry: ModelEntry, where: str) -> None:
    """Raise BundleError unless the values of a well-typed entry are consistent."""
    counts = {
        "vocab_size": entry.vocab_size,
        "context_length": entry.context_length,
        "kv: num_layers": entry.kv.num_layers,
        "kv: num_heads": entry.kv.num_heads,
        "kv: head_dim": entry.kv.head_dim,
        "sliding_window": 1 if entry.sliding_window is None else entry.sliding_window,
    }
    for name, count in counts.items():
        if count < 1:
            raise mismatch("a number above 0", count, f"{where}: {name}")
        most = _MOST_LAYERS if name == "kv: num_layers" else _MOST
        if count > most:
            raise mismatch(f"at most {most}", count, f"{where}: {name}")
    choices = (
        ("dtype", entry.dtype, DTYPES),
        ("kv: dtype", entry.kv.dtype, DTYPES),
        ("quantization", entry.quantization, QUANTIZATIONS),
        ("parity: measure", entry.parity.measure, PARITY_MEASURES),
    )
    for name, value, known in choices:
        if value not in known:
            raise mismatch(f"one of {', '.join(known)}", value, f"{where}: {name}")
    special_ids = [
        *entry.eos_token_ids,
        *([] if entry.bos_token_id is None else [entry.bos_token_id]),
    ]
    for token_id in special_ids:
        if not 0 <= token_id < entry.vocab_size:
            raise mismatch(f"0 to {entry.vocab_size - 1}", token_id, f"{where}: a special token id")
    _check_logits(entry, where)
    _check_masks(entry, where)


def _check_logits(entry: ModelEntry, where: str) -> None:
    try:
        is_known = parse_num_top_logits(entry.logits) <= entry.vocab_size
    except ValueError:
        is_known = False
    if not is_known:
        expected = f"full or topk:K with K from 1 to {entry.vocab_size}"
        raise mismatch(expected, entry.logits, f"{where}: logits")


def _check_masks(entry: ModelEntry, where: str) -> None:
    names = sorted(entry.masks)
    known = ([ATTENTION_MASK], [ATTENTION_MASK_SLIDING], [ATTENTION_MASK, ATTENTION_MASK_SLIDING])
    if names not in known:
        raise mismatch(f"one of {known}", entry.masks, f"{where}: masks")
    if (ATTENTION_MASK_SLIDING in names) != (entry.sliding_window is not None):
        expected = "a number exactly when masks has attention_mask_sliding"
        raise mismatch(expected, entry.sliding_window, f"{where}: sliding_window")
