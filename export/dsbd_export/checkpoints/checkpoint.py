"""Checkpoint: description of a model before its weights are read."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from dsbd_export.checkpoints.adapter import Adapter
from dsbd_export.checkpoints.ctranslate2_file import Ctranslate2File
from dsbd_export.checkpoints.quantized_weights import quantization_of
from dsbd_export.progress import silenced_libraries
from dsbd_runtime.parts.attention.attention_rows import ATTENTION_MASK
from dsbd_runtime.parts.attention.cache_entries import CacheEntry
from dsbd_runtime.parts.given.given_rows import GivenEntry
from dsbd_runtime.parts.source.encoder_entry import EncoderEntry

_KIND_BY_WORD = {  # kind of input, by a word in the name of a part's config
    **dict.fromkeys(("vision", "vit", "image", "video"), "image"),
    **dict.fromkeys(("audio", "speech", "encoder"), "audio"),
}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Description of a checkpoint before its weights are read."""

    role: str  # "target" or "draft"
    folder: Path  # contains config.json, weights and tokenizer.json, or ``gguf_file``
    config: PreTrainedConfig
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    context_length: int  # the checkpoint's, or a shorter requested length
    layer_masks: tuple[str | None, ...]  # mask input of each layer; None: no attention
    sliding_window: int | None
    trust_remote_code: bool
    gguf_file: str | None = None  # name of the file in ``folder`` that is the whole checkpoint
    ctranslate2: Ctranslate2File | None = None  # its weights, in another folder than ``folder``
    target_folder: Path | None = None
    feature_layers: tuple[int, ...] | None = (
        None  # layers of a target whose inputs are its features
    )
    # (n,) int64, ascending: tokens that a draft may propose; None: all
    proposed_tokens: NDArray[np.int64] | None = None
    caches: tuple[CacheEntry, ...] = ()  # caches of its layers; empty until the model is loaded
    composite: PreTrainedConfig | None = None  # the whole config of a composite model
    adapter: Adapter | None = None  # merged into the weights when they are loaded
    encoder: EncoderEntry | None = None  # without cross rows until the model is loaded
    # entries of an exported target, whose encoder a draft may share
    target_encoder: EncoderEntry | None = None
    target_given: GivenEntry | None = None
    # texts of tokenizer.json by folder, loaded once for all copies, see ``tokenizer_json``
    tokenizer_texts: dict[Path, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def reads_whole_path(self) -> bool:
        """Whether a draft's rows need all rows before them, see ``ModelEntry``."""
        return self.encoder is not None or self.target_folder is not None

    @property
    def family(self) -> str:
        """Return the ``model_type`` of the checkpoint, or the method of a feature draft."""
        return str((self.composite or self.config).model_type)

    @property
    def names_proposed(self) -> bool:
        """Return whether its weights name the tokens that it proposes; then options may not."""
        return False

    def read_from(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return readers by the model's names of weights, from readers by names in files."""
        return stored

    @property
    def shares_encoder(self) -> bool:
        """Return whether it is a draft whose encoder is known to be the target's."""
        return self.encoder is not None and bool(self.encoder.is_shared)

    @property
    def unread_inputs(self) -> list[str] | None:
        """Return the kinds of input that only omitted parts read; None: nothing is omitted."""
        if self.composite is None or self.encoder is not None:
            return None
        inputs = set()
        for name in self.composite.sub_configs:
            if getattr(self.composite, name, None) is not self.config:
                kinds = [kind for word, kind in _KIND_BY_WORD.items() if word in name]
                inputs.add(kinds[0] if kinds else name.removesuffix("_config"))
        return sorted(inputs)

    @property
    def is_computed(self) -> bool:
        """Return whether weights are computed in fp32 from stored values."""
        is_quantized = quantization_of(self.composite or self.config) is not None
        others = (self.gguf_file, self.ctranslate2, self.adapter)
        return is_quantized or any(each is not None for each in others)

    @property
    def source(self) -> Path:
        """Return its path: its folder, or the GGUF file or model.bin with its weights."""
        if self.ctranslate2 is not None:
            return self.ctranslate2.file
        return self.folder if self.gguf_file is None else self.folder / self.gguf_file

    @property
    def tokenizer_folder(self) -> Path:
        """Return the folder of the tokenizer: an adapter may have its own."""
        has_own = self.adapter is not None and self.adapter.has_tokenizer
        return self.adapter.folder if self.adapter is not None and has_own else self.folder

    @property
    def tokenizer_gguf(self) -> str | None:
        """Return the name of the GGUF file with the tokenizer; None: it is in other files."""
        return self.gguf_file if self.tokenizer_folder == self.folder else None

    @property
    def masks(self) -> list[str]:
        """Return the mask inputs that layers read; recurrences read the full mask."""
        of_layers = {mask for mask in self.layer_masks if mask is not None}
        return sorted(of_layers or {ATTENTION_MASK})


@contextlib.contextmanager
def limited_threads(number: int | None) -> Iterator[None]:
    """Limit the threads of torch and of the engines of ``parity_engine`` in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence warnings, log lines below ERROR and progress bars inside the block."""
    had_progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with silenced_libraries():
            yield
    finally:
        if had_progress:
            transformers_logging.enable_progress_bar()
