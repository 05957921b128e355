"""Content of dsbd.json: typed entries, and the checks of their values against each other.

A later version may add fields without a new schema version: a field that is null or absent means
that the bundle lacks the feature. So an unknown field is ignored if it is null, else refused with
its name. A field that is added later has a default and may be absent. Only a change of existing
fields, which older versions would misread, needs a new schema version.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsbd_forward.spec import EngineSpec, MemorySpec
from dsbd_runtime.bundle_files.draft_record import DraftAgreement
from dsbd_runtime.bundle_files.older_manifests import MOST_LAYERS, OLDER_VERSIONS, as_current
from dsbd_runtime.errors import BundleError
from dsbd_runtime.media import given_grid, given_picture, given_sound  # noqa: F401 - kinds of media
from dsbd_runtime.parts.attention.attention_rows import (
    ATTENTION_MASK,
    ATTENTION_MASK_SLIDING,
    AttentionEntry,
)
from dsbd_runtime.parts.attention.cache_entries import CacheEntry, every_row, recent
from dsbd_runtime.parts.feature.features import FeatureEntry, features_part
from dsbd_runtime.parts.given.given_rows import GivenEntry, GivenRowsEntry, check_shared_rows
from dsbd_runtime.parts.head.head import FULL, HeadEntry, parse_num_top_logits
from dsbd_runtime.parts.part import GraphContract, PartEntry
from dsbd_runtime.parts.recent.recent_rows import RecentEntry
from dsbd_runtime.parts.source.alignment import AlignmentGraphEntry
from dsbd_runtime.parts.source.encoder_entry import EncoderEntry, check_shared_encoder
from dsbd_runtime.parts.source.sources import SourcesEntry
from dsbd_runtime.parts.source.speech_entry import check_speech
from dsbd_runtime.typed_json import (
    UnknownEntryError,
    check_counts,
    in_short,
    json_from_file,
    mismatch,
    name_in_short,
    typed,
)

SCHEMA_VERSION = 4
MANIFEST_NAME = "dsbd.json"
DTYPES = ("fp32", "fp16", "bf16")
QUANTIZATIONS = ("none", "int8-dynamic", "int8", "int4")
INT4_SYMMETRIC = "int4-symmetric"
QUANTIZED_FORMS = (*QUANTIZATIONS, INT4_SYMMETRIC)
_OPTIONS = {"int8-dynamic": "int8", "int8": "int8-blocks", INT4_SYMMETRIC: "int4"}
PORTABLE, CUDA, WEBGPU = FORMS = ("portable", "cuda", "webgpu")
LOGITS_KINDS = ("full", "topk", "gather")  # the last is refused with a separate message
BIT_EXACTNESS = ("by construction", "observed", False, None)
_MOST = 2**31 - 1
PARITY_MEASURES = ("max_abs_error", "mean_kl")


def quantize_option(quantization: str) -> str:
    """Return the value of dsbd-export --quantize that gives a quantization of a manifest."""
    return _OPTIONS.get(quantization, quantization)


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """One comparison with the checkpoint: its kind, its prompt length and its differences.

    max_abs_error: maximum error of a logit.
    mean_kl: mean over rows of KL(checkpoint || engine), in nats.
    top1_agreement: share of the rows in which both have the same most probable token.
    """

    name: str
    prompt_length: int
    max_abs_error: float
    mean_kl: float
    top1_agreement: float


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """Differences between engine and checkpoint that the export measured, and their limit.

    measure: the measure of the limit, one of ``PARITY_MEASURES``.
    limit: highest accepted value on the text and, for "max_abs_error", on every case. For "mean_kl"
        the forests of random tokens have a looser limit.
    max_abs_error: maximum over all cases.
    mean_kl: mean over the rows of real text, which is a separate case.
    top1_agreement: share over the rows of real text.
    accepted: limit given by a person after ``limit`` refused the engine; None: the engine passed.
    """

    measure: str
    limit: float
    max_abs_error: float
    mean_kl: float
    top1_agreement: float
    cases: list[ParityCase]
    accepted: float | None = None


@dataclass(frozen=True, kw_only=True)
class NativeText:
    """Whether the native library's text equals Python's, as earlier exports measured it.

    encodes: text to ids.
    decodes: ids to text.
    renders: chats to text; None: no chat template.
    reason: the first difference or refusal of each; None: no difference.
    """

    encodes: bool
    decodes: bool
    renders: bool | None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """Manifest entry of one engine: all data that a program needs to run it.

    Attributes:
        family: ``model_type`` of the checkpoint, for people; nothing depends on it.
        num_layers: transformer layers, including those without a cache.
        dtype: one of ``DTYPES``, the type of weights that are not quantized.
        quantization: one of ``QUANTIZED_FORMS``; "int4" has zero points, "int4-symmetric" has not.
        logits: "full", or "topk:K" with K up to the vocabulary; see ``head``.
        full_logits: whether the graph has the output ``logits``; always, except with "topk:K".
        masks: the mask inputs of the graph, a subset of the two in ``attention_rows``.
        sliding_window: positions that a sliding-window layer sees, None without such layers.
        bit_exact: one of ``BIT_EXACTNESS``: whether a row's logits depend only on its path, bit for
            bit, independent of the call and the cache. None: no claim.
        features: hidden states of the target that the engine returns, or that a feature draft's
            engine reads; None: no features.
        unread_inputs: kinds of input that the checkpoint reads but this engine does not, such as
            "image" and "audio", because it is the text part of a composite model. None: it reads
            all.
        adapter: name of the adapter merged into the weights, for people; None: no adapter.
        encoder: encoder of an encoder-decoder, whose other fields are for its decoder; None: the
            engine reads no source.
        given: sound or pictures within prompts, whose rows an encoder computes; None: only text.
        form: operators of the graphs, one of ``FORMS``; None: portable, or made by version 0.1.
        native_text: for a target in bundles without text_checks.json; None: not measured.
        agreement: a draft's agreement with the target, from which draft policy "throughput" starts;
            None: not measured.
    """

    family: str
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    context_length: int
    num_layers: int
    caches: list[CacheEntry]
    dtype: str
    quantization: str
    logits: str
    full_logits: bool
    masks: list[str]
    sliding_window: int | None
    parity: ParityReport
    bit_exact: str | bool | None = None
    features: FeatureEntry | None = None
    unread_inputs: list[str] | None = None
    adapter: str | None = None
    encoder: EncoderEntry | None = None
    given: GivenEntry | None = None
    form: str | None = None
    native_text: NativeText | None = None
    agreement: DraftAgreement | None = None

    @property
    def head(self) -> HeadEntry:
        return HeadEntry(kind=self.logits, vocab_size=self.vocab_size, full_logits=self.full_logits)

    @property
    def parts(self) -> list[PartEntry]:
        """The kinds of state that the engine is made of, in the order in which calls bind them."""
        sources = [] if self.encoder is None else [SourcesEntry(encoder=self.encoder)]
        attention = AttentionEntry(
            caches=every_row(self.caches),
            masks=self.masks,
            sliding_window=self.sliding_window,
            reads_positions=any(each.encoder.reads_positions for each in sources),
        )
        parts: list[PartEntry] = []
        if self.features is not None:
            parts.append(features_part(self.features, self.dtype))
        parts += [*sources, attention]
        if self.given is not None:  # after the positions, which it may replace
            parts.append(GivenRowsEntry(given=self.given))
        parts.append(self.head)
        if rows := recent(self.caches):
            parts.append(RecentEntry(caches=rows))
        parts += [
            AlignmentGraphEntry(
                attention=attention,
                sources=each,
                head=dataclasses.replace(self.head, kind=FULL),
                num_heads=each.encoder.num_alignment_heads,
                context_length=self.context_length,
            )
            for each in sources
            if each.encoder.num_alignment_heads
        ]
        return parts

    @property
    def contract(self) -> GraphContract:
        return GraphContract.of(self.parts)

    @property
    def spec(self) -> EngineSpec:
        """The engine as decoding sees it: the union of its parts."""
        fields = {name: value for part in self.parts for name, value in part.spec.items()}
        kept = frozenset(cache.kind for cache in self.caches)
        memory = MemorySpec(kept=kept, grows_in_steps=True)
        return EngineSpec(
            vocab_size=self.vocab_size, context_length=self.context_length, memory=memory, **fields
        )

    @property
    def reads_whole_path(self) -> bool:
        """Whether a draft's rows need all rows before them: features, a source or given rows."""
        return self.is_feature_draft or self.encoder is not None or self.given is not None

    @property
    def is_feature_draft(self) -> bool:
        return self.features is not None and self.features.own_width is not None


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size in bytes and sha256 (hex) of one file of the bundle."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of dsbd.json."""

    schema_version: int  # that of the file; the other fields are converted to ``SCHEMA_VERSION``
    versions: dict[str, str]  # versions of the tools that made the bundle
    target: ModelEntry
    draft: ModelEntry | None
    files: dict[str, FileEntry]  # by path relative to the bundle

    @property
    def entry_by_role(self) -> dict[str, ModelEntry]:
        return entry_by_role(self.target, self.draft)


def entry_by_role(target: ModelEntry, draft: ModelEntry | None) -> dict[str, ModelEntry]:
    """Return the entries as a dict with "target" and, if present, "draft"."""
    return {"target": target} | ({} if draft is None else {"draft": draft})


def manifest_from_file(file: Path) -> Manifest:
    """Read and check dsbd.json; raise BundleError naming the place of the first mismatch."""
    data = json_from_file(file)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if type(version) is not int or version not in (SCHEMA_VERSION, *OLDER_VERSIONS):
        older = " and ".join(map(str, OLDER_VERSIONS))
        raise BundleError(
            f"{file} has schema_version {in_short(version)}, this version reads {SCHEMA_VERSION}, "
            f"{older}; export the bundle again with this version of dsbd-ort"
        )
    data = as_current(data, version, str(file))
    try:
        manifest = typed(Manifest, data, str(file))
        check_entries(manifest.target, manifest.draft, str(file))
    except UnknownEntryError as error:
        versions = data.get("versions")
        made_by = versions.get("dsbd-ort") if isinstance(versions, dict) else None
        raise UnknownEntryError(*error.entry, f"the bundle ({in_short(made_by)})") from error
    return manifest


def check_entries(target: ModelEntry, draft: ModelEntry | None, where: str) -> None:
    """Raise BundleError unless each entry is consistent, and both with each other."""
    for role, entry in entry_by_role(target, draft).items():
        check_entry(entry, f"{where}: {role}")
    check_shared_encoder(target.encoder, None if draft is None else draft.encoder, where)
    check_shared_rows(target.given, None if draft is None else draft.given, where)
    _check_features(target.features, None if draft is None else draft.features, target, where)


def check_entry(entry: ModelEntry, where: str) -> None:
    """Raise BundleError unless the values of a well-typed entry are consistent."""
    counts = {
        "vocab_size": entry.vocab_size,
        "context_length": entry.context_length,
        "sliding_window": 1 if entry.sliding_window is None else entry.sliding_window,
    }
    check_counts(counts, where)
    check_counts({"num_layers": entry.num_layers}, where, MOST_LAYERS)
    _check_caches(entry.caches, entry.num_layers, f"{where}: caches")
    if entry.encoder is not None:
        _check_encoder(entry.encoder, entry, f"{where}: encoder")
    if entry.given is not None:
        entry.given.check(entry.vocab_size, entry.num_layers, f"{where}: given")
    choices = (
        ("dtype", entry.dtype, DTYPES),
        ("quantization", entry.quantization, QUANTIZED_FORMS),
        ("parity: measure", entry.parity.measure, PARITY_MEASURES),
        ("form", entry.form or PORTABLE, FORMS),
    )
    for name, value, supported in choices:
        if value not in supported:
            raise mismatch(f"one of {', '.join(supported)}", value, f"{where}: {name}")
    if entry.bit_exact not in BIT_EXACTNESS:
        raise mismatch(f"one of {BIT_EXACTNESS}", entry.bit_exact, f"{where}: bit_exact")
    if entry.agreement is not None:
        entry.agreement.check(f"{where}: agreement")
    for token_id in (*entry.eos_token_ids, entry.bos_token_id or 0):
        if not 0 <= token_id < entry.vocab_size:
            raise mismatch(f"0 to {entry.vocab_size - 1}", token_id, f"{where}: a special token id")
    _check_logits(entry, where)
    _check_masks(entry, where)


def _check_caches(caches: Sequence[CacheEntry], num_layers: int, where: str) -> None:
    """Raise BundleError unless the caches and their layers are valid and in the order of layers."""
    layers = [cache.layer for cache in caches]
    if not layers or layers != sorted(layers) or not 0 <= layers[0] <= layers[-1] < num_layers:
        expected = f"increasing layers from 0 to {num_layers - 1}, at least one"
        raise mismatch(expected, layers, where)
    kinds = [(cache.layer, cache.kind) for cache in caches]
    if len(set(kinds)) < len(kinds):
        raise mismatch("one entry for each layer and kind", kinds, where)
    for index, cache in enumerate(caches):
        _check_rows(cache, f"{where}[{index}]")


def _check_rows(rows: CacheEntry, where: str) -> None:
    if rows.dtype not in DTYPES:
        raise mismatch(f"one of {', '.join(DTYPES)}", rows.dtype, f"{where}: dtype")
    sizes = dataclasses.asdict(rows).items()
    check_counts({n: size for n, size in sizes if type(size) is int and n != "layer"}, where)


def _check_encoder(encoder: EncoderEntry, entry: ModelEntry, where: str) -> None:
    """Raise BundleError unless the values of an encoder are consistent with its decoder's."""
    sizes = {"vocab_size": encoder.vocab_size, "context_length": encoder.context_length}
    if encoder.hidden_width is not None:
        sizes["hidden_width"] = encoder.hidden_width
    check_counts(sizes, where)
    if not 0 <= (encoder.unknown_token_id or 0) < encoder.vocab_size:
        place = f"{where}: unknown_token_id"
        raise mismatch(f"0 to {encoder.vocab_size - 1}", encoder.unknown_token_id, place)
    tokens = {"start_token_id": encoder.start_token_id, **(encoder.languages or {})}
    for name, token_id in tokens.items():
        if not 0 <= token_id < entry.vocab_size:
            place = f"{where}: {name_in_short(name)}"
            raise mismatch(f"0 to {entry.vocab_size - 1}", token_id, place)
    if encoder.speech is not None:
        check_speech(encoder.speech, entry.vocab_size, f"{where}: speech")
    if encoder.picture is not None:
        encoder.picture.check(f"{where}: picture")
    _check_caches(encoder.cross, entry.num_layers, f"{where}: cross")


def _check_features(
    returned: FeatureEntry | None, read: FeatureEntry | None, target: ModelEntry, where: str
) -> None:
    """Raise BundleError unless the target returns the features that the draft reads."""
    if returned is not None:
        layers, num_layers = returned.layers, target.num_layers
        place = f"{where}: target: features"
        is_known = bool(layers) and all(0 <= layer <= num_layers for layer in layers or ())
        if not is_known or len(set(layers or ())) < len(layers or ()):
            raise mismatch(f"different layers from 0 to {num_layers}", layers, place)
        if not 1 <= returned.width <= _MOST or returned.width % len(layers or ()):
            raise mismatch("a width for each layer, all alike", returned.width, place)
        if returned.own_width is not None:
            raise mismatch("null own_width: it is a draft's", returned.own_width, place)
    if read is None:
        return
    place = f"{where}: draft: features"
    if read.layers is not None or read.own_width is None or not 1 <= read.own_width <= _MOST:
        raise mismatch("own_width above 0, and null layers: they are the target's", read, place)
    if returned is None or returned.width != read.width:
        width = "null" if returned is None else f"of width {returned.width}"
        raise BundleError(
            f"{place} have width {in_short(read.width)}, but those of the target are {width}; "
            "export target and draft again, both with dsbd-export --target --draft"
        )


def _check_logits(entry: ModelEntry, where: str) -> None:
    if entry.logits.partition(":")[0] not in LOGITS_KINDS:
        raise UnknownEntryError("logits", entry.logits, where)
    if entry.logits == "gather":
        raise BundleError(
            f"{where} has a gather head, which this version no longer runs; export the bundle "
            "again with --logits topk:64, whose engines return the same logits under a trie"
        )
    try:
        is_known = parse_num_top_logits(entry.logits) <= entry.vocab_size
    except ValueError:
        is_known = False
    if not is_known:
        expected = f"full or topk:K with K from 1 to {entry.vocab_size}"
        raise mismatch(expected, entry.logits, f"{where}: logits")
    if entry.logits == FULL and not entry.full_logits:
        expected = f"true with logits {entry.logits}"
        raise mismatch(expected, entry.full_logits, f"{where}: full_logits")


def _check_masks(entry: ModelEntry, where: str) -> None:
    names = sorted(entry.masks)
    supported = (
        [ATTENTION_MASK],
        [ATTENTION_MASK_SLIDING],
        [ATTENTION_MASK, ATTENTION_MASK_SLIDING],
    )
    if names not in supported:
        raise mismatch(f"one of {supported}", entry.masks, f"{where}: masks")
    if (ATTENTION_MASK_SLIDING in names) != (entry.sliding_window is not None):
        expected = "a number exactly when masks has attention_mask_sliding"
        raise mismatch(expected, entry.sliding_window, f"{where}: sliding_window")
