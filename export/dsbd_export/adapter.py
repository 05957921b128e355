"""Adapter of a checkpoint: a PEFT folder, found, checked, and merged into its model's weights.

peft does the merging. What it would not miss is checked here: settings of a later version, weights
without a place, and whether the merged model still computes what model and adapter do together.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftConfig, PeftModel
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsbd_export.errors import ExportError, reason_of

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")

_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")
_NAME = "default"  # peft's own, of an adapter in memory
_ABOUT = ("auto_mapping", "peft_version")  # of adapter_config.json: no settings
_EMPTY: tuple[object, ...] = (None, False, 0, "", [], {})
_NUM_PROBED = 24  # tokens
_MOST_DIFFERENCE = 1e-3  # of the largest logit; merging rounds in fp32, and changes nothing else
_BY_HAND = (
    "merge it by peft's merge_and_unload(), save model and tokenizer with save_pretrained to "
    "another folder, and export that"
)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Adapter that is merged into a model when it is loaded.

    Attributes:
        name: the folder's or that on the hub, for people.
        folder: of adapter_config.json and the weights.
        kind: peft's name of the method, as "LORA".
        base_name: what it calls the model that it was trained for; None: it does not say.
        vocab_size: rows of the embedding that it holds whole, more than the model's where tokens
            were added in training; None: it holds none.
    """

    name: str
    folder: Path
    kind: str
    base_name: str | None
    vocab_size: int | None

    @property
    def has_tokenizer(self) -> bool:
        """Return whether a tokenizer was saved with it, which is then that of the merged model."""
        return any((self.folder / name).is_file() for name in TOKENIZER_FILES)


def report_adapter(adapter: Adapter | None, base: str, report: Callable[[str], None]) -> None:
    """Report what is merged into which model, ``base`` as the user calls it."""
    if adapter is None:
        return
    report(f"merging the adapter {adapter.name} ({adapter.kind}) into {base}")
    if adapter.base_name is not None and not _is_same_name(adapter.base_name, base):
        report(f"warning: the adapter {adapter.name} was trained for {adapter.base_name}")
    if adapter.has_tokenizer:
        report(f"the tokenizer is that of the adapter {adapter.name}")


def read_adapter(source: str, folder: Path) -> Adapter:
    """Return the adapter in a folder; no weights are read.

    Raises:
        ExportError: it is none, or of a kind that cannot be merged into weights.
    """
    where = f"the adapter at {folder}"
    content = adapter_content(folder)
    if content is None or not any((folder / name).is_file() for name in WEIGHT_FILES):
        lacking = CONFIG_FILE if content is None else " or ".join(WEIGHT_FILES)
        raise ExportError(
            f"{where} has no {lacking}; give a folder as peft's save_pretrained writes it"
        )
    kind = str(content.get("peft_type"))
    if kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise ExportError(f"{where} is of type {kind}, which peft does not know; {_BY_HAND}")
    _check_settings(where, content, kind)
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except Exception as error:
        raise ExportError(
            f"{CONFIG_FILE} of {where} cannot be read: {reason_of(error)}; copy it again"
        ) from error
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise ExportError(
            f"{where} is of type {kind}, which adds rows to a prompt or cache and so cannot be "
            "merged into weights; train a LoRA adapter instead"
        )
    return Adapter(
        name=source if not Path(source).expanduser().is_dir() else folder.resolve().name,
        folder=folder,
        kind=kind,
        base_name=config.base_model_name_or_path or None,
        vocab_size=_vocab_size(folder),
    )


def adapter_content(folder: Path) -> dict[str, Any] | None:
    """Return what adapter_config.json says, None where there is none that can be read."""
    try:
        content = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def merge_adapter(model: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """Return a model of fp32 weights, given up to this, with the adapter merged into them.

    Raises:
        ExportError: the adapter is for another model, or is more than a change of weights.
    """
    adapted = _beside(model, adapter)
    wanted = _probed_logits(adapted, model)
    where = f"the adapter at {adapter.folder} ({adapter.kind})"
    try:
        merged: PreTrainedModel = adapted.merge_and_unload()
    except Exception as error:
        raise ExportError(
            f"{where} cannot be merged into weights: {_reason(error)}; train a LoRA adapter instead"
        ) from error
    found = _probed_logits(merged, merged)
    difference, largest = float((found - wanted).abs().max()), float(wanted.abs().max())
    if not difference <= _MOST_DIFFERENCE * largest:
        raise ExportError(
            f"{where} is more than a change of weights: once it is merged, logits of up to "
            f"{largest:.2g} are off by {difference:.2g} from those of the model beside the "
            "adapter; train a LoRA adapter instead"
        )
    return merged


def _beside(model: PreTrainedModel, adapter: Adapter) -> PeftModel:
    """Return the model with all weights of the adapter beside its own, each with its place."""
    where = f"the adapter at {adapter.folder}"
    trained_for = f" ({adapter.base_name})" if adapter.base_name else ""
    fix = f"give the model that it was trained for{trained_for}"
    _resize(model, adapter.vocab_size)
    try:
        config = PeftConfig.from_pretrained(str(adapter.folder))
        config.inference_mode = True
        adapted = PeftModel(model, config, _NAME)
        loaded = adapted.load_adapter(str(adapter.folder), _NAME, torch_device="cpu")
    except Exception as error:
        raise ExportError(
            f"{where} does not fit {type(model).__name__} of {_shape(model)}: {_reason(error)}; "
            f"{fix}"
        ) from error
    for what, names in (("has no", loaded.missing_keys), ("has unknown", loaded.unexpected_keys)):
        if names:
            raise ExportError(
                f"{where} {what} weight {min(names)}, and {len(names) - 1} more; {fix}, or copy "
                "the adapter again"
            )
    if not all(bool(each.isfinite().all()) for each in _token_weights(model)):
        raise ExportError(
            f"{where} has {adapter.vocab_size} rows of an embedding, and not as many of the head; "
            f"{fix}, or {_BY_HAND}"
        )
    _untie(model)
    return adapted.eval()


def _resize(model: PreTrainedModel, vocab_size: int | None) -> None:
    """Give a model the rows that an adapter's embedding has; new ones are no numbers until then."""
    num_own = model.config.get_text_config(decoder=True).vocab_size
    if vocab_size is None or vocab_size == num_own:
        return
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    for weight in _token_weights(model):
        weight.data[num_own:] = torch.nan


def _token_weights(model: PreTrainedModel) -> list[Tensor]:
    """Return the weights of embedding and head that are in use, of one row for each token."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    return [each.weight for each in modules if each is not None]


def _vocab_size(folder: Path) -> int | None:
    """Return the rows of the embedding among an adapter's weights, None where there is none."""
    file = folder / WEIGHT_FILES[0]
    if not file.is_file():
        return None
    with safe_open(file, framework="pt") as weights:
        for name in weights.keys():
            if name.endswith(".weight") and name.split(".")[-2] in _EMBEDDINGS:
                return int(weights.get_slice(name).get_shape()[0])
    return None


def _is_same_name(base: str, source: str) -> bool:
    """Return whether two names, on the hub or of folders, may mean one model.

    "unsloth/Llama-3.2-1B-bnb-4bit" and "meta-llama/Llama-3.2-1B" may; so may the name of a file.
    """
    names = [each.rstrip("/").rpartition("/")[2].casefold() for each in (base, source)]
    return names[0] in names[1] or names[1] in names[0]


def _check_settings(where: str, content: dict[str, Any], kind: str) -> None:
    """Raise ExportError for a setting that peft would leave out: it warns, and goes on."""
    known = {field.name for field in dataclasses.fields(PEFT_TYPE_TO_CONFIG_MAPPING[kind])}
    for name, value in content.items():
        if name not in known and name not in _ABOUT and value not in _EMPTY:
            raise ExportError(
                f"{where} sets {name} = {value!r}, which the installed peft does not know; install "
                f"the version that made it ({content.get('peft_version', 'not named')}), and "
                f"{_BY_HAND}"
            )


def _untie(model: PreTrainedModel) -> None:
    """Give the head a weight of its own where the adapter changes it or the embedding.

    Merged into the one weight that both have, what one of them learned would change the other.
    """
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    embedding, head = (getattr(each, "base_layer", each) for each in modules)
    is_changed = any(type(each).__module__.startswith("peft.") for each in modules)
    if not is_changed or head is None or head.weight is not embedding.weight:
        return
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for each in (model.config, model.config.get_text_config(decoder=True)):
        each.tie_word_embeddings = False


@torch.inference_mode()
def _probed_logits(computes: nn.Module, model: PreTrainedModel) -> Tensor:
    """Return the logits of a few tokens, (_NUM_PROBED, V)."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (1, _NUM_PROBED), generator=generator)
    logits: Tensor = computes(input_ids=ids, use_cache=False).logits[0].float()
    return logits


def _shape(model: PreTrainedModel) -> str:
    config = model.config.get_text_config(decoder=True)
    return f"{config.num_hidden_layers} layers of width {config.hidden_size}"


def _reason(error: Exception) -> str:
    """Return the reason, with the first weight whose shape differs: torch's second line."""
    lines = [line.strip() for line in str(error).splitlines()]
    differing = next((line for line in lines if line.startswith("size mismatch")), None)
    return differing or reason_of(error)
