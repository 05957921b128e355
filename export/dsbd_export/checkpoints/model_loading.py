"""Model of a checkpoint in memory: the unmodified text part, as transformers loads it.

For a composite model, the wrapper's forward is kept and the parts for pictures or sound are
omitted. The wrapper may scale logits (Cohere2-Vision) or give positions in rows for time, height
and width (Qwen-VL), or transformers may have no class for the text part alone.
"""

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from optimum.exporters.tasks import TasksManager
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsbd_export.checkpoints.adapter import merge_adapter
from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.checkpoints.checkpoint_files import (
    TORCH_DTYPES,
    WRAPPERS,
    open_weights,
    safetensors_files,
    stored_dtype,
    widen_constants,
)
from dsbd_export.checkpoints.gguf_file import gguf_weights
from dsbd_export.checkpoints.model_config import model_class_of
from dsbd_export.checkpoints.other_tasks import refusal_of_head
from dsbd_export.checkpoints.quantized_weights import (
    PLAIN,
    check_plain,
    plain_config,
    plain_weights,
    quantization_of,
)
from dsbd_export.errors import ExportError, reason_of
from dsbd_export.progress import MB, Counter, Report, silent

_TIED = "tie_word_embeddings"


def load_model(
    checkpoint: Checkpoint,
    dtype: str = "fp32",
    report: Report = silent,
    model_class: Any = None,
) -> PreTrainedModel:
    """Return the unmodified transformers model in evaluation mode, its weights in ``dtype``.

    Parts that read no text are omitted. Constants that are computed from the config stay in fp32.

    model_class: None for transformers' class for the config.
    """
    with quiet_libraries(), _as_loading_errors(checkpoint):
        model, info = _load(checkpoint, TORCH_DTYPES[dtype], report, model_class)
    missing = sorted(info["missing_keys"])
    configs = (
        model.config.get_text_config(decoder=True),
        model.config,
    )  # some models set it in only one
    is_tied = next((c.tie_word_embeddings for c in configs if hasattr(c, _TIED)), False)
    if (missing or is_tied) and (reason := refusal_of_head(info["unexpected_keys"])):
        raise ExportError(f"the {checkpoint.role} at {checkpoint.source} {reason}")
    if missing:
        raise ExportError(
            f"the {checkpoint.role} at {checkpoint.source} lacks {len(missing)} weights, the first "
            f"is {missing[0]}; the checkpoint is incomplete, copy or download it again"
        )
    if checkpoint.adapter is not None:
        with quiet_libraries():
            model = merge_adapter(model, checkpoint.adapter)
    if checkpoint.composite is not None and checkpoint.encoder is None:
        keep_text_part(model)
    widen_constants(model)
    return model.eval()


def cache_name(module: nn.Module) -> str:
    """Return the name of a module's cache argument: "cache", or "past_key_values" (older code)."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def hash_weights(weights: Mapping[str, Tensor], digest: Any) -> None:
    """Add names, shapes and numbers of weights to a hash; numbers are hashed in fp32."""
    for name, weight in sorted(weights.items()):
        numbers: Any = weight.detach().to("cpu", torch.float32).contiguous().numpy()
        digest.update(f"{name} {numbers.shape} ".encode())
        digest.update(memoryview(numbers).cast("B"))


def reference_dtype(checkpoint: Checkpoint, wanted: str) -> str:
    """Return the precision in which the reference model loses no stored value."""
    if wanted == "fp32" or checkpoint.is_computed:
        return "fp32"
    with _as_loading_errors(checkpoint):
        return stored_dtype(checkpoint.folder) or "fp32"


@contextlib.contextmanager
def _as_loading_errors(checkpoint: Checkpoint) -> Iterator[None]:
    try:
        yield
    except ExportError as error:
        raise ExportError(f"the {checkpoint.role} at {checkpoint.source}: {error}") from error
    except Exception as error:
        raise ExportError(
            f"the {checkpoint.role} at {checkpoint.source} cannot be loaded: "
            f"{reason_of(error)}; check its files"
        ) from error


def _load(
    checkpoint: Checkpoint, dtype: torch.dtype, report: Report, model_class: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model and the loading info of transformers, which lists missing weights."""
    options: dict[str, Any] = {"output_loading_info": True, "local_files_only": True}
    as_stored = checkpoint.composite or checkpoint.config
    config = plain_config(as_stored)
    model_class = model_class or model_class_of(config)

    def load(source: Path | None = None, **more: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
        model_and_info: tuple[PreTrainedModel, dict[str, Any]]
        model_and_info = model_class.from_pretrained(source, dtype=dtype, **more, **options)
        return model_and_info

    if model_class and checkpoint.gguf_file is not None:
        phase = f"{checkpoint.role}: dequantizing {checkpoint.gguf_file}"
        report(phase)
        counter = Counter(phase, MB, report)
        dequantized = gguf_weights(checkpoint.source, model_class, config, counter)
        return load(config=config, state_dict=dequantized)
    if checkpoint.ctranslate2 is not None:
        report(f"{checkpoint.role}: {checkpoint.ctranslate2.description}")
        return load(config=config, state_dict=checkpoint.ctranslate2.weights())
    has_own_code = checkpoint.trust_remote_code and hasattr(config, "auto_map")
    if model_class and not has_own_code and safetensors_files(checkpoint.folder):
        with open_weights(checkpoint.folder) as weights:
            plain = checkpoint.read_from(plain_weights(weights, as_stored))
            loaded = load(config=config, state_dict=plain)
            check_plain(loaded[0], as_stored, plain, loaded[1]["unexpected_keys"])
        return loaded
    if quantization_of(as_stored) is not None:
        raise ExportError(
            f"quantized weights are read only from safetensors, by a class of transformers; {PLAIN}"
        )
    # The checkpoint has its own model class or another weight format, which needs more memory.
    # transformers replaces each pattern once in a name
    options["key_mapping"] = {WRAPPERS: "", rf"{WRAPPERS}(?=\w)": ""}
    is_whole = checkpoint.composite is None and checkpoint.encoder is None
    if not is_whole and model_class and not has_own_code:
        return load(checkpoint.folder)
    whole: tuple[PreTrainedModel, dict[str, Any]] = TasksManager.get_model_from_task(
        "text-generation",
        str(checkpoint.folder),
        framework="pt",
        library_name="transformers",
        torch_dtype=dtype,
        trust_remote_code=checkpoint.trust_remote_code,
        **options,
    )
    return whole


class AbsentPart(nn.Module):
    """An omitted part of a composite model; text never reaches it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, *_: Any, **__: Any) -> Any:
        raise ExportError(
            f"the model calls its part {self._name!r} for text alone, but the export omits this "
            "part; the family is not supported, choose another checkpoint"
        )


def keep_text_part(model: PreTrainedModel) -> None:
    """Replace all parts except decoder and head, in place; raise ExportError without a decoder."""
    decoder = model.get_decoder()
    if decoder is None or decoder is model:
        raise ExportError(
            f"{type(model).__name__} has no text decoder of its own (get_decoder); choose "
            "another checkpoint"
        )
    kept = [decoder, model.get_output_embeddings()]
    _leave_out(model, [part for part in kept if part is not None])


def _leave_out(module: nn.Module, kept: list[nn.Module]) -> None:
    for name, child in list(module.named_children()):
        if any(child is part for part in kept):
            continue
        inside = set(child.modules())
        if any(part in inside for part in kept):
            _leave_out(child, kept)
        elif any(True for _ in child.parameters()):
            setattr(module, name, AbsentPart(name))
