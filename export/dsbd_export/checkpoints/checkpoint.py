"""Checkpoint: its folder, the content of its config, and the model with its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)
from transformers.utils import logging as transformers_logging

from dsbd_export.checkpoints.adapter import Adapter, read_adapter
from dsbd_export.checkpoints.checkpoint_files import located, located_adapter
from dsbd_export.checkpoints.composite import unread_inputs
from dsbd_export.checkpoints.gguf_file import gguf_end_ids, gguf_refusal, read_gguf_config
from dsbd_export.checkpoints.gguf_header import read_header
from dsbd_export.checkpoints.json_files import json_object
from dsbd_export.checkpoints.model_config import (
    constant_rope_length,
    decoder_vocab_size,
    layer_masks,
    refusal_of,
    target_positions,
    text_config,
    window_within,
)
from dsbd_export.checkpoints.other_weights import refusal_of_files
from dsbd_export.checkpoints.proposed_tokens import read_proposed_tokens
from dsbd_export.checkpoints.quantized_weights import quantization_of
from dsbd_export.config import (
    MAX_CONTEXT,
    MIN_CONTEXT,
    DraftConfig,
    ExportConfig,
    ModelOptions,
)
from dsbd_export.encoder_decoder.checkpoint import encoder_entry
from dsbd_export.errors import ExportError, reason_of
from dsbd_export.feature_draft.config import (
    FEATURE_FAMILY,
    FeatureDraftConfig,
    is_feature_draft,
    read_feature_config,
)
from dsbd_export.progress import silenced_libraries
from dsbd_runtime.engine.graph import ATTENTION_MASK, ATTENTION_MASK_SLIDING
from dsbd_runtime.parts.cache_entries import CacheEntry
from dsbd_runtime.parts.encoder_entry import EncoderEntry


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Description of a checkpoint, known before its weights are read.

    Attributes:
        role: "target" or "draft".
        folder: of config.json, the weights and tokenizer.json; or of ``gguf_file``.
        config: the transformers config, of a composite model that of its text part.
        composite: the whole config of a composite model, whose text part alone is exported; None
            for any other model.
        context_length: that of the checkpoint, or the shorter one that was requested.
        layer_masks: by layer, the name of its mask input; None for one that does not attend.
        sliding_window: positions that a sliding-window layer sees, None without such layers.
        trust_remote_code: whether modelling code in the folder may run.
        gguf_file: name of the one file in ``folder`` that is all of the checkpoint; None: there is
            no such file.
        features: config of a feature draft, whose ``config`` is that of its transformer layer; None
            for any other model.
        target_folder: the target's, for a feature draft that is exported beside it.
        feature_layers: of a target, the layers whose inputs are its features; None: it has none.
        proposed_tokens: (n,) int64, ascending. Tokens that a draft may propose; None: all that it
            has.
        caches: of its layers; none before the model is loaded, which tells them.
        adapter: what is merged into the weights when they are loaded; None: nothing.
        encoder: of an encoder-decoder, without cross rows before the model is loaded, which tells
            them; None for any other model.
        target_encoder: of a draft, the target's encoder as it was exported, which it may share;
            None for any other model.
    """

    role: str
    folder: Path
    config: PreTrainedConfig
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    context_length: int
    layer_masks: tuple[str | None, ...]
    sliding_window: int | None
    trust_remote_code: bool
    gguf_file: str | None = None
    features: FeatureDraftConfig | None = None
    target_folder: Path | None = None
    feature_layers: tuple[int, ...] | None = None
    proposed_tokens: NDArray[np.int64] | None = None
    caches: tuple[CacheEntry, ...] = ()
    composite: PreTrainedConfig | None = None
    adapter: Adapter | None = None
    encoder: EncoderEntry | None = None
    target_encoder: EncoderEntry | None = None

    @property
    def family(self) -> str:
        """Return the ``model_type`` of the checkpoint, or the method of a feature draft."""
        whole = self.composite or self.config
        return str(whole.model_type) if self.features is None else FEATURE_FAMILY

    @property
    def unread_inputs(self) -> list[str] | None:
        """Return the kinds of input that only parts left out read; None: nothing is left out."""
        return None if self.composite is None else unread_inputs(self.composite, self.config)

    @property
    def is_computed(self) -> bool:
        """Return whether weights are computed from those that are stored, in fp32.

        Quantized values times their scales are numbers of fp32, and so are sums with an adapter's.
        """
        is_quantized = quantization_of(self.composite or self.config) is not None
        return is_quantized or self.gguf_file is not None or self.adapter is not None

    @property
    def source(self) -> Path:
        """Return what an export of it names: its folder, or its GGUF file."""
        return self.folder if self.gguf_file is None else self.folder / self.gguf_file

    @property
    def tokenizer_folder(self) -> Path:
        """Return where the tokenizer lies: an adapter may have one of its own."""
        has_own = self.adapter is not None and self.adapter.has_tokenizer
        return self.adapter.folder if self.adapter is not None and has_own else self.folder

    @property
    def tokenizer_gguf(self) -> str | None:
        """Return the name of the GGUF file that has the tokenizer; None: there is no such file."""
        return self.gguf_file if self.tokenizer_folder == self.folder else None

    @property
    def masks(self) -> list[str]:
        """Return the mask inputs that at least one layer reads; recurrences read the full one."""
        of_layers = {mask for mask in self.layer_masks if mask is not None}
        return sorted(of_layers or {ATTENTION_MASK})


def open_pair(options: ExportConfig) -> tuple[Checkpoint, Checkpoint | None]:
    """Find target and, where one is given, draft and read their configs; no weights are read."""
    sources = {"target": options.target}
    if options.draft is not None:
        sources["draft"] = options.draft
    opened = _opened(sources, options)
    draft = opened.get("draft")
    if draft is not None:
        draft = _adapted(draft, options.draft_adapter)
    return _adapted(opened["target"], options.adapter), draft


def open_target(source: str, options: ModelOptions) -> Checkpoint:
    """Find a target and read its config; no weights are read."""
    return _checked_tokens(_opened({"target": source}, options)["target"])


def open_draft(options: DraftConfig) -> Checkpoint:
    """Find the draft and read its config; no weights are read."""
    return _adapted(_opened({"draft": options.draft}, options)["draft"], options.draft_adapter)


def _opened(sources: Mapping[str, str], options: ModelOptions) -> dict[str, Checkpoint]:
    """Return the checkpoints by "target" and "draft", as far as these have a source."""
    if options.revision is not None and all(Path(each).exists() for each in sources.values()):
        are = "are both local" if len(sources) == 2 else "is local"
        raise ExportError(
            f"revision={options.revision!r} has no meaning: {' and '.join(sources)} {are}; "
            "leave it out or give a hub id"
        )
    places = {role: located(source, options) for role, source in sources.items()}
    return {
        role: (_open_gguf if place.is_file() else open_checkpoint)(role, place, options)
        for role, place in places.items()
    }


def open_checkpoint(role: str, folder: Path, options: ModelOptions) -> Checkpoint:
    """Read the config files in ``folder``; ``role`` is "target" or "draft"."""
    if reason := refusal_of_files(role, folder):
        raise ExportError(f"the {role} at {folder} {reason}")
    if not (folder / "config.json").is_file():
        raise ExportError(
            f"the {role} at {folder} has no config.json; give a checkpoint folder"
            f"{_instead_of_folder(folder)}"
        )
    if is_feature_draft(folder):
        return _feature_checkpoint(role, folder, options)
    config, generation = _read_configs(role, folder, options.trust_remote_code)
    return _decoder_checkpoint(role, folder, config, generation, options)


def _instead_of_folder(folder: Path) -> str:
    found = sorted(folder.glob("*.gguf"))
    return f", or a GGUF file, as {found[0]}" if found else ""


def _open_gguf(role: str, file: Path, options: ModelOptions) -> Checkpoint:
    """Return the checkpoint that is all in one file."""
    header = read_header(file)
    with quiet_libraries():
        config = read_gguf_config(role, file, header)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ExportError(
            f"the {role} in {file} (family {config.model_type}) is no causal language model of "
            "transformers; export the checkpoint folder that the file was made from"
        )
    if what := gguf_refusal(header, config):
        raise ExportError(
            f"the {role} in {file} changes its rotary frequencies ({what}), which transformers' "
            "reader of GGUF leaves out; export the checkpoint folder that the file was made from"
        )
    generation = {"eos_token_id": gguf_end_ids(header)}
    return _decoder_checkpoint(role, file.parent, config, generation, options, gguf_file=file.name)


def _decoder_checkpoint(
    role: str,
    folder: Path,
    whole: PreTrainedConfig,
    generation: dict[str, Any],
    options: ModelOptions,
    *,
    gguf_file: str | None = None,
) -> Checkpoint:
    if reason := refusal_of(whole):
        raise ExportError(
            f"the {role} at {folder} (family {whole.model_type}) cannot be exported: {reason}; "
            "choose another checkpoint"
        )
    config = text_config(whole)
    encoder = None
    if config.is_encoder_decoder:
        encoder = encoder_entry(role, folder, config, generation, options)
    elif options.max_source is not None:
        raise ExportError(
            f"max_source={options.max_source} has no meaning for the {role} (family "
            f"{whole.model_type}), which reads no source; leave it out"
        )
    context_length = _context_length(role, config, options.max_context)
    window = window_within(config, context_length)
    masks = layer_masks(config, window)
    vocab_size = config.vocab_size if encoder is None else decoder_vocab_size(config)
    proposed = read_proposed_tokens(folder, vocab_size)
    if proposed is not None and role != "draft":
        raise ExportError(
            f"the {role} at {folder} was trained to propose {len(proposed)} tokens only, as the "
            f"draft of another model; give it as the draft, and that model as the {role}"
        )
    bos = _special_tokens(role, folder, generation, whole, "bos_token_id")
    return Checkpoint(
        role=role,
        folder=folder,
        config=config,
        vocab_size=vocab_size,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_special_tokens(role, folder, generation, whole, "eos_token_id"),
        context_length=context_length,
        layer_masks=masks,
        sliding_window=window if ATTENTION_MASK_SLIDING in masks else None,
        trust_remote_code=options.trust_remote_code,
        composite=None if whole is config else whole,
        gguf_file=gguf_file,
        proposed_tokens=proposed,
        encoder=encoder,
    )


def _adapted(checkpoint: Checkpoint, source: str | None) -> Checkpoint:
    """Return the checkpoint with an adapter, which is a folder or a hub id; None: without one."""
    if source is None:
        return _checked_tokens(checkpoint)
    if checkpoint.features is not None:
        raise ExportError(
            f"the draft at {checkpoint.folder} is a feature draft, for which there are no "
            "adapters; leave draft_adapter out"
        )
    if checkpoint.encoder is not None:
        raise ExportError(
            f"the {checkpoint.role} at {checkpoint.folder} is an encoder-decoder, for which "
            "adapters are not supported; merge it into the checkpoint with PEFT, and export that"
        )
    adapter = read_adapter(source, located_adapter(source))
    grown = adapter.grown(checkpoint.vocab_size)
    return _checked_tokens(replace(checkpoint, adapter=adapter, vocab_size=grown))


def _feature_checkpoint(role: str, folder: Path, options: ModelOptions) -> Checkpoint:
    """Return a feature draft; ``pair`` adds what it takes from its target."""
    if role != "draft":
        raise ExportError(
            f"the {role} at {folder} is a feature draft (EAGLE), which has no meaning without its "
            f"target; give it as the draft, and the model that it was trained for as the {role}"
        )
    features = read_feature_config(folder)
    layer = features.layer
    return Checkpoint(
        role=role,
        folder=folder,
        config=layer,
        vocab_size=layer.vocab_size,
        bos_token_id=None,
        eos_token_ids=[],
        context_length=layer.max_position_embeddings,
        layer_masks=layer_masks(layer, None),
        sliding_window=None,
        trust_remote_code=False,
        features=features,
    )


def _read_configs(
    role: str, folder: Path, trust_remote_code: bool
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Return the config and the content of generation_config.json, {} where there is none."""
    try:
        with quiet_libraries():
            config = AutoConfig.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
    except Exception as error:
        raise ExportError(
            f"the config of the {role} at {folder} cannot be read: {reason_of(error)}; check "
            "config.json, or allow its own code with trust_remote_code if you trust it"
        ) from error
    file = folder / "generation_config.json"
    return config, json_object(file) if file.is_file() else {}


def _special_tokens(
    role: str, folder: Path, generation: dict[str, Any], config: PreTrainedConfig, name: str
) -> list[int]:
    """Return token ids: those of generation_config.json first, as transformers does.

    Raises:
        ExportError: they are no token ids.
    """
    places = (getattr(config, name, None), getattr(text_config(config), name, None))
    given = (generation.get(name), *places)
    found: Any = next((each for each in given if each is not None), [])
    tokens = found if isinstance(found, list | tuple) else [found]
    if not all(type(token) is int for token in tokens):
        raise ExportError(
            f"the {role} at {folder} has {name} {found!r}, expected a token id"
            f"{' or a list of them' * (name == 'eos_token_id')}; change it in "
            "generation_config.json or config.json"
        )
    return list(tokens)


def _checked_tokens(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint; raise ExportError unless its special tokens are in its vocabulary.

    Ids that no file states are left out: GPT-2's config has 50256 for vocabularies of any size.
    """
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


def _context_length(role: str, config: PreTrainedConfig, max_context: int | None) -> int:
    """Return the context to export for; by default the longest with constant frequencies.

    A graph has one set of rotary frequencies, and most texts are short: the long set is for those
    who ask for its context.
    """
    of_checkpoint: int | None = getattr(config, "max_position_embeddings", None)
    if config.is_encoder_decoder:
        of_checkpoint = target_positions(config, max_context)
    elif max_context is None:
        max_context = constant_rope_length(config)
    if of_checkpoint is None and max_context is None:
        raise ExportError(
            f"the config of the {role} names no max_position_embeddings; give max_context"
        )
    lengths = [length for length in (of_checkpoint, max_context) if length is not None]
    if min(lengths) < MIN_CONTEXT:
        raise ExportError(
            f"the {role} has a context of {min(lengths)} tokens, at least {MIN_CONTEXT} are needed"
        )
    if min(lengths) > MAX_CONTEXT:
        raise ExportError(
            f"the {role} has a context of {min(lengths)} tokens by its config, at most "
            f"{MAX_CONTEXT} are possible; give max_context"
        )
    return min(lengths)


@contextlib.contextmanager
def limited_threads(number: int | None) -> Iterator[None]:
    """Let torch, and the engines of ``parity_engine``, use so many threads in the block.

    number: None for as many as before.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence warnings, log lines below ERROR and progress bars inside the block.

    Problems that matter are checked here and raised: missing weights, unused hooks, parity.
    """
    had_progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with silenced_libraries():
            yield
    finally:
        if had_progress:
            transformers_logging.enable_progress_bar()
