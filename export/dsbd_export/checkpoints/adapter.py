"""Adapter of a checkpoint: a PEFT folder that is checked and merged into the model's weights.

This module refuses adapters that peft would accept silently: with settings of a later version, with
weights that match no module, or whose merged model differs from model and adapter together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftConfig, PeftModel
from peft.utils.save_and_load import load_peft_weights
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsbd_export.checkpoints.adapter_files import (
    BY_HAND,
    CONFIG_FILE,
    WEIGHT_FILES,
    check_patterns,
    check_settings,
    fewest_tokens,
    module_names,
    num_embedded,
    weight_shapes,
)
from dsbd_export.checkpoints.checkpoint_files import json_object_or_none
from dsbd_export.errors import ExportError, reason_of

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")

_OTHER_TASKS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
_NAME = "default"  # peft's name for an adapter in memory
_NUM_PROBED = 24  # tokens of the comparison after a merge
_MOST_DIFFERENCE = 1e-3  # relative to the largest logit; a merge only rounds in fp32


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Adapter that is merged into a model when it is loaded."""

    name: str
    folder: Path
    kind: str  # peft's name of the method, such as "LORA"
    base_name: str | None  # name of the model that it was trained for; None: unknown
    vocab_size: int | None  # tokens of the embedding in its weights; None: it has no embedding
    fewest_tokens: (
        int  # smallest vocabulary that its weights for the head and for single tokens need
    )

    def grown(self, vocab_size: int) -> int:
        """Return the vocabulary size of a model of ``vocab_size`` tokens after the merge."""
        return self.vocab_size or max(vocab_size, self.fewest_tokens)

    @property
    def has_tokenizer(self) -> bool:
        """Return whether the adapter has a tokenizer, which the merged model then uses."""
        return any((self.folder / name).is_file() for name in TOKENIZER_FILES)


def report_adapter(adapter: Adapter | None, base: str, report: Callable[[str], None]) -> None:
    """Report the adapter that is merged into a model; ``base``: the model as the user named it."""
    if adapter is None:
        return
    report(f"merging the adapter {adapter.name} ({adapter.kind}) into {base}")
    # Two different names, of the hub or of folders, may mean the same model or its 4-bit copy.
    names = (each.rstrip("/").rpartition("/")[2] for each in (adapter.base_name or base, base))
    theirs, ours = (name.casefold() for name in names)
    if theirs not in ours and ours not in theirs:
        report(f"warning: the adapter {adapter.name} was trained for {adapter.base_name}")
    if adapter.has_tokenizer:
        report(f"the tokenizer is that of the adapter {adapter.name}")


def read_adapter(source: str, folder: Path) -> Adapter:
    """Return the adapter in a folder; raise ExportError if it cannot be merged."""
    where = f"the adapter at {folder}"
    missing = [] if (folder / CONFIG_FILE).is_file() else [CONFIG_FILE]
    if not any((folder / name).is_file() for name in WEIGHT_FILES):
        missing.append(" or ".join(WEIGHT_FILES))
    if missing:
        raise ExportError(
            f"{where} has no {missing[0]}; give a folder as peft's save_pretrained writes it"
        )
    if (content := json_object_or_none(folder / CONFIG_FILE)) is None:
        raise ExportError(f"{CONFIG_FILE} of {where} is no JSON object; copy it again")
    kind = str(content.get("peft_type"))
    if kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise ExportError(f"{where} is of type {kind}, which peft does not know; {BY_HAND}")
    if (task := content.get("task_type")) in _OTHER_TASKS:
        raise ExportError(
            f"{where} was trained for the task {task}, which writes no text; choose another, or if "
            f'it is for text, set "task_type": "CAUSAL_LM" in {CONFIG_FILE}'
        )
    shapes = weight_shapes(where, folder)
    check_settings(where, content, kind, shapes)
    check_patterns(where, content, module_names(shapes))
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
        vocab_size=num_embedded(shapes),
        fewest_tokens=fewest_tokens(content, shapes),
    )


def merge_adapter(model: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """Return a model with the adapter merged into fp32 weights; raise ExportError if it cannot."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    adapted = _with_adapter(model, adapter)
    wanted = _probed_logits(adapted, model)
    where = f"the adapter at {adapter.folder} ({adapter.kind})"
    try:
        merged: PreTrainedModel = adapted.merge_and_unload()
    except Exception as error:
        raise ExportError(
            f"{where} cannot be merged into weights: {_reason(error)}; train a LoRA adapter instead"
        ) from error
    if adapter.grown(vocab_size) > vocab_size:
        _check_rows(where, merged, vocab_size)
    merged_logits = _probed_logits(merged, merged)
    difference, largest = float((merged_logits - wanted).abs().max()), float(wanted.abs().max())
    if not difference <= _MOST_DIFFERENCE * largest:
        raise ExportError(
            f"{where} is more than a change of weights: after the merge, logits of up to "
            f"{largest:.2g} differ by {difference:.2g} from those of model and adapter; train a "
            "LoRA adapter instead"
        )
    return merged


def _with_adapter(model: PreTrainedModel, adapter: Adapter) -> PeftModel:
    where = f"the adapter at {adapter.folder}"
    trained_for = f" ({adapter.base_name})" if adapter.base_name else ""
    fix = f"give the model that it was trained for{trained_for}"
    _resize(model, adapter)
    names = (name for name, _ in model.named_modules())
    check_patterns(where, json_object_or_none(adapter.folder / CONFIG_FILE) or {}, names)
    try:
        config = PeftConfig.from_pretrained(str(adapter.folder))
        config.inference_mode = True
        adapted = PeftModel(model, config, _NAME)
        loaded = adapted.load_adapter(str(adapter.folder), _NAME, torch_device="cpu")
    except Exception as error:
        config = model.config.get_text_config(decoder=True)
        shape = f"{config.num_hidden_layers} layers of width {config.hidden_size}"
        raise ExportError(
            f"{where} does not fit {type(model).__name__} of {shape}: {_reason(error)}; {fix}"
        ) from error
    unknown = _without_copies(loaded.unexpected_keys, adapter)
    for what, keys in (("has no", loaded.missing_keys), ("has unknown", unknown)):
        if keys:
            raise ExportError(
                f"{where} {what} weight {min(keys)}, and {len(keys) - 1} more; {fix}, or copy "
                "the adapter again"
            )
    _untie(model)
    return adapted.eval()


def _without_copies(names: Sequence[str], adapter: Adapter) -> list[str]:
    """Return the names in the file except those of copies of loaded weights.

    PEFT saves weights of ``modules_to_save`` and tied rows of tokens twice, but loads only one.
    """
    if not names:
        return []
    weights = load_peft_weights(str(adapter.folder), device="cpu")
    loaded = [weight for name, weight in weights.items() if name not in names]
    return [
        name
        for name in names
        if name not in weights or not any(torch.equal(weights[name], each) for each in loaded)
    ]


def _resize(model: PreTrainedModel, adapter: Adapter) -> None:
    """Give a model rows for the adapter's tokens; new rows are NaN until they are loaded."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    if (wanted := adapter.grown(vocab_size)) == vocab_size:
        return
    model.resize_token_embeddings(wanted, mean_resizing=False)
    for weight in _token_weights(model):
        weight.data[vocab_size:] = torch.nan


def _check_rows(where: str, merged: PreTrainedModel, num_before: int) -> None:
    """Raise ExportError unless all tokens beyond ``num_before`` have rows of embedding and head."""
    for what, weight in zip(("embedding", "head"), _token_weights(merged), strict=False):
        if lacking := int((~weight[num_before:].isfinite().all(dim=1)).sum()):
            raise ExportError(
                f"{where} is for {len(weight)} tokens, the model has {num_before}, and it has no "
                f"rows of the {what} for {lacking} of the {len(weight) - num_before} added ones; "
                "save it again with save_pretrained(..., save_embedding_layers=True), or " + BY_HAND
            )


def _token_weights(model: PreTrainedModel) -> list[Tensor]:
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    return [each.weight for each in modules if each is not None]


def _untie(model: PreTrainedModel) -> None:
    """Separate the head's weight from the embedding if the adapter changes one of them."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    embedding, head = (getattr(each, "base_layer", each) for each in modules)
    is_changed = any(type(each).__module__.startswith("peft.") for each in modules)
    if not is_changed or head is None or head.weight is not embedding.weight:
        return
    if "weight" not in head._parameters:  # both were trained as one weight
        return
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for each in (model.config, model.config.get_text_config(decoder=True)):
        each.tie_word_embeddings = False


@torch.inference_mode()
def _probed_logits(computes: nn.Module, model: PreTrainedModel) -> Tensor:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (1, _NUM_PROBED), generator=generator)
    logits: Tensor = computes(input_ids=ids, use_cache=False).logits[0].float()
    return logits


def _reason(error: Exception) -> str:
    """Return torch's line about the first weight whose shape differs, else the first line."""
    lines = [line.strip() for line in str(error).splitlines()]
    differing = next((line for line in lines if line.startswith("size mismatch")), None)
    return differing or reason_of(error)
