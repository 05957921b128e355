"""Opening of checkpoints: kinds of models, and how each is recognized, read and paired.

No weights are read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dsbd_export.checkpoints.adapter import read_adapter
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.checkpoint_files import pointer_in
from dsbd_export.checkpoints.gguf_file import is_gguf
from dsbd_export.checkpoints.model_config import CheckpointFiles, GgufFiles, read_decoder
from dsbd_export.config import DraftConfig, DraftedOptions, ExportConfig, ModelOptions
from dsbd_export.encoder_decoder.checkpoint import (
    check_readers,
    is_encoder_decoder,
    read_encoder_decoder,
    with_languages,
)
from dsbd_export.encoder_decoder.ctranslate2_folder import is_ctranslate2, transformers_files
from dsbd_export.encoder_decoder.source import EncoderDecoderSource
from dsbd_export.errors import ExportError
from dsbd_export.feature_draft.checkpoint import (
    FeatureDraftCheckpoint,
    added_features,
    check_features_pair,
    has_feature_draft,
    paired_features,
    read_feature_draft,
)
from dsbd_export.feature_draft.multi_token import MTP, mtp_or_feature_source, read_mtp_draft
from dsbd_export.given_prompt.checkpoint import (
    GivenCheckpoint,
    check_given_pair,
    is_given_prompt,
    read_given_prompt,
)
from dsbd_export.given_prompt.source import GivenPromptSource
from dsbd_export.locating import located, located_adapter, refusal_of_files
from dsbd_export.model_source import ModelSource, SourceOf
from dsbd_export.pair import agreed_draft, agreed_pair
from dsbd_export.progress import Report
from dsbd_runtime.bundle_files.bundle import Bundle, ModelEntry
from dsbd_runtime.bundle_files.manifest import PORTABLE, WEBGPU
from dsbd_runtime.parts.attention.cache_entries import recent


@dataclass(frozen=True, kw_only=True)
class ModelKind:
    """One kind of model."""

    # whether the files of a checkpoint are of this kind; the first kind that recognizes them reads
    # them
    recognizes: Callable[[CheckpointFiles], bool]
    read: Callable[[CheckpointFiles], Checkpoint]
    has: Callable[[Checkpoint], bool]
    source: SourceOf
    # raises ExportError for a pair, or options, that are not supported. The target is a checkpoint
    # or a manifest entry; the draft may be None.
    check: Callable[[Checkpoint | ModelEntry, Checkpoint | None, DraftedOptions], None] = (
        lambda *_: None
    )
    paired: Callable[[Checkpoint, Checkpoint, Report], tuple[Checkpoint, Checkpoint]] = agreed_pair
    # returns a draft of this kind, aligned with the target of a bundle
    added: Callable[[Bundle, Checkpoint, Report], Checkpoint] = agreed_draft
    as_target: Callable[[Checkpoint], Checkpoint] = lambda target: target
    without_adapters: str = ""  # why adapters are not supported; "" if they are


KINDS = (
    ModelKind(
        recognizes=has_feature_draft,
        read=read_feature_draft,
        has=lambda checkpoint: isinstance(checkpoint, FeatureDraftCheckpoint),
        source=mtp_or_feature_source,
        check=check_features_pair,
        paired=paired_features,
        added=added_features,
        without_adapters="a feature draft, for which there are no adapters; leave draft_adapter "
        "out",
    ),
    ModelKind(
        recognizes=is_encoder_decoder,
        read=read_encoder_decoder,
        has=lambda checkpoint: checkpoint.encoder is not None,
        source=EncoderDecoderSource,
        check=check_readers,
        as_target=with_languages,
        without_adapters="an encoder-decoder, for which adapters are not supported; merge it into "
        "the checkpoint with PEFT, and export that",
    ),
    ModelKind(
        recognizes=is_given_prompt,
        read=read_given_prompt,
        has=lambda checkpoint: isinstance(checkpoint, GivenCheckpoint),
        source=GivenPromptSource,
        check=check_given_pair,
        without_adapters="a model with an encoder, for which adapters are not supported; merge it "
        "into the checkpoint with PEFT, and export that",
    ),
    ModelKind(recognizes=lambda _: True, read=read_decoder, has=lambda _: True, source=ModelSource),
)


def kind_of(checkpoint: Checkpoint) -> ModelKind:
    """Return the kind of a checkpoint."""
    return next(kind for kind in KINDS if kind.has(checkpoint))


def source_of(checkpoint: Checkpoint) -> ModelSource:
    """Return the model source of a checkpoint."""
    return kind_of(checkpoint).source(checkpoint)


def check_pair(
    target: Checkpoint | ModelEntry, draft: Checkpoint | None, config: DraftedOptions
) -> None:
    """Raise ExportError for a target, a draft if any, or options that are not supported."""
    for kind in KINDS:
        kind.check(target, draft, config)
    for each in (target, draft):
        if isinstance(each, Checkpoint):
            check_form(each, config)


_WITH_STATE = {"conv", "hybrid", "linear_attention"}  # types of layers


def check_form(checkpoint: Checkpoint, options: ModelOptions) -> None:
    """Raise ExportError for a model without the form of ``options``; no caches may be known yet."""
    if options.form != WEBGPU:
        return
    layer_types = getattr(checkpoint.config.get_text_config(), "layer_types", None) or ()
    if not _WITH_STATE.isdisjoint(layer_types) or recent(checkpoint.caches):
        raise ExportError(
            f"the {checkpoint.role} (family {checkpoint.family}) cannot be exported with form="
            f"{WEBGPU!r}, which has no convolutions and recurrences; use form={PORTABLE!r}"
        )


def open_pair(options: ExportConfig) -> tuple[Checkpoint, Checkpoint | None]:
    """Find the target and the draft, if one is given, and read their configs, not weights."""
    sources = {"target": options.target}
    if options.draft not in (None, MTP):
        sources["draft"] = options.draft
    opened = _opened(sources, options)
    draft = read_mtp_draft(opened["target"]) if options.draft == MTP else opened.get("draft")
    if draft is not None:
        draft = _adapted(draft, options.draft_adapter)
    return _adapted(opened["target"], options.adapter), draft


def open_target(source: str, options: ModelOptions) -> Checkpoint:
    """Find a target and read its config, not its weights."""
    return _checked_tokens(_opened({"target": source}, options)["target"])


def open_sibling(source: str, options: ModelOptions) -> Checkpoint:
    """Find a model that a draft begins as and read its config, not its weights."""
    return _checked_tokens(_opened({"draft": source}, options)["draft"])


def open_draft(options: DraftConfig) -> Checkpoint:
    """Find the draft and read its config, not its weights."""
    if options.draft == MTP:
        raise ExportError(
            f"draft={MTP!r} is a part of the target's checkpoint, which {options.bundle} lacks; "
            f"export both together, with --target and --draft {MTP}"
        )
    return _adapted(_opened({"draft": options.draft}, options)["draft"], options.draft_adapter)


def _opened(sources: Mapping[str, str], options: ModelOptions) -> dict[str, Checkpoint]:
    if options.revision is not None and all(Path(each).exists() for each in sources.values()):
        are = "are both local" if len(sources) == 2 else "is local"
        raise ExportError(
            f"revision={options.revision!r} has no meaning: {' and '.join(sources)} {are}; "
            "leave it out or give a hub id"
        )
    places = {role: located(source, options) for role, source in sources.items()}
    return {
        role: _read(GgufFiles(role, place.parent, options, place.name))
        if is_gguf(place)
        else open_checkpoint(role, place, options)
        for role, place in places.items()
    }


def open_checkpoint(role: str, folder: Path, options: ModelOptions) -> Checkpoint:
    """Read the config files in ``folder``; ``role`` is "target" or "draft"."""
    files = CheckpointFiles(role, folder, options)
    if reason := refusal_of_files(files):
        raise ExportError(f"the {role} at {folder} {reason}")
    if is_ctranslate2(folder):
        made, weights = transformers_files(folder)
        return replace(_read(CheckpointFiles(role, made, options)), ctranslate2=weights)
    if not (folder / "config.json").is_file():
        found = sorted(folder.glob("*.gguf"))
        raise ExportError(
            f"the {role} at {folder} has no config.json; give a checkpoint folder"
            f"{f', or a GGUF file, such as {found[0]}' if found else ''}"
        )
    return _read(files)


def _read(files: CheckpointFiles) -> Checkpoint:
    return next(kind for kind in KINDS if kind.recognizes(files)).read(files)


def _adapted(checkpoint: Checkpoint, source: str | None) -> Checkpoint:
    """Return the checkpoint with an adapter, a folder or a hub id; None: without an adapter."""
    if source is None:
        return _checked_tokens(checkpoint)
    if reason := kind_of(checkpoint).without_adapters:
        raise ExportError(f"the {checkpoint.role} at {checkpoint.folder} is {reason}")
    folder = located_adapter(source)
    if refusal := pointer_in(folder):
        raise ExportError(f"the adapter at {folder} cannot be read: {refusal}")
    adapter = read_adapter(source, folder)
    grown = adapter.grown(checkpoint.vocab_size)
    return _checked_tokens(replace(checkpoint, adapter=adapter, vocab_size=grown))


def _checked_tokens(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint; raise ExportError unless its special tokens are in its vocabulary."""
    checkpoint = _without_default_tokens(checkpoint)
    bos = [] if checkpoint.bos_token_id is None else [checkpoint.bos_token_id]
    for name, tokens in (("bos_token_id", bos), ("eos_token_id", checkpoint.eos_token_ids)):
        for token in tokens:
            if not 0 <= token < checkpoint.vocab_size:
                raise ExportError(
                    f"the {checkpoint.role} at {checkpoint.folder} has {name} {token}, expected a "
                    f"token of its vocabulary, 0 to {checkpoint.vocab_size - 1}; change it in "
                    "generation_config.json or config.json"
                )
    return checkpoint


def _without_default_tokens(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint without the default ids of its config's class beyond its vocabulary."""
    defaults = type(checkpoint.config)()
    bos, eos = (getattr(defaults, name, None) for name in ("bos_token_id", "eos_token_id"))
    size = checkpoint.vocab_size
    if isinstance(bos, int) and bos >= size and checkpoint.bos_token_id == bos:
        checkpoint = replace(checkpoint, bos_token_id=None)
    if isinstance(eos, int) and eos >= size and checkpoint.eos_token_ids == [eos]:
        checkpoint = replace(checkpoint, eos_token_ids=[])
    return checkpoint
