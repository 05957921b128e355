"""Model of a checkpoint in memory: the unmodified one of transformers, its text part alone."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from optimum.exporters.tasks import TasksManager
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from dsbd_export.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.composite import keep_text_part
from dsbd_export.errors import ExportError, reason_of
from dsbd_export.gguf_file import gguf_weights
from dsbd_export.weights import (
    TORCH_DTYPES,
    open_weights,
    safetensors_files,
    stored_dtype,
    widen_constants,
)


def load_model(checkpoint: Checkpoint, dtype: str = "fp32") -> PreTrainedModel:
    """Return the unmodified transformers model in evaluation mode, its weights in ``dtype``.

    Of a composite model the parts that read no text are left out.
    ``dtype`` is "fp32", "fp16" or "bf16". Constants that follow from the config stay in fp32.
    """
    with quiet_libraries(), _as_loading_errors(checkpoint):
        model, info = _load(checkpoint, TORCH_DTYPES[dtype])
    if missing := sorted(info["missing_keys"]):
        raise ExportError(
            f"the {checkpoint.role} at {checkpoint.folder} lacks {len(missing)} weights, the first "
            f"is {missing[0]}; the checkpoint is incomplete, copy or download it again"
        )
    if checkpoint.composite is not None:
        keep_text_part(model)
    widen_constants(model)
    return model.eval()


def cache_name(module: nn.Module) -> str:
    """Return the argument, and the field of its output, for the cache of a module of transformers.

    It is "cache" from 5.24 on; models with code of their own keep the older "past_key_values".
    """
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def reference_dtype(checkpoint: Checkpoint, wanted: str) -> str:
    """Return the precision to load a checkpoint in so that its stored values are all there.

    ``wanted`` is that of the export. fp32 holds every stored value; a narrower one may not, so the
    reference logits then come from the weights as stored, before they are rounded. Where
    those are wider than ``wanted``, they set the peak of the memory.
    """
    if wanted == "fp32" or checkpoint.gguf_file is not None:
        return "fp32"  # quantized values times their scales are numbers of fp32
    with _as_loading_errors(checkpoint):
        return stored_dtype(checkpoint.folder) or "fp32"


@contextlib.contextmanager
def _as_loading_errors(checkpoint: Checkpoint) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ExportError(
            f"the {checkpoint.role} at {checkpoint.folder} cannot be loaded: "
            f"{reason_of(error)}; check its files"
        ) from error


def _load(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model and the loading info of transformers, which lists missing weights."""
    options: dict[str, Any] = {"output_loading_info": True, "local_files_only": True}
    config = checkpoint.composite or checkpoint.config
    model_class = _model_class(config)
    loaded: tuple[PreTrainedModel, dict[str, Any]]
    if model_class and checkpoint.gguf_file is not None:
        plain = gguf_weights(checkpoint.folder / checkpoint.gguf_file, model_class, config)
        loaded = model_class.from_pretrained(
            None, config=config, state_dict=plain, dtype=dtype, **options
        )
        return loaded
    has_own_code = checkpoint.trust_remote_code and hasattr(config, "auto_map")
    if model_class and not has_own_code and safetensors_files(checkpoint.folder):
        with open_weights(checkpoint.folder) as weights:
            loaded = model_class.from_pretrained(
                None, config=config, state_dict=weights, dtype=dtype, **options
            )
        return loaded
    # A model class of the checkpoint's own, or weights in another format: takes more memory.
    if checkpoint.composite is not None and model_class and not has_own_code:
        loaded = model_class.from_pretrained(checkpoint.folder, dtype=dtype, **options)
        return loaded
    loaded = TasksManager.get_model_from_task(
        "text-generation",
        str(checkpoint.folder),
        framework="pt",
        library_name="transformers",
        torch_dtype=dtype,
        trust_remote_code=checkpoint.trust_remote_code,
        **options,
    )
    return loaded


def _model_class(config: PreTrainedConfig) -> Any:
    """Return the class of transformers for a config: of a composite model, that of the whole."""
    causal = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return causal or MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
