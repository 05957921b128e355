"""Files of a checkpoint: JSON, the tokens that a draft was trained to propose, and weights.

Weights are read in their stored precision and converted in place.
"""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsbd_errors.git_lfs import pointer_refusal
from dsbd_export.errors import ExportError, reason_of


def json_object(file: Path) -> dict[str, Any]:
    """Return the content of a file; raise ExportError unless it is an object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ExportError(
            f"{file} cannot be read as JSON: {reason_of(error)}; copy it again"
        ) from error
    if not isinstance(content, dict):
        raise ExportError(f"{file} has a {type(content).__name__}, expected an object of JSON")
    return content


def json_object_or_none(file: Path) -> dict[str, Any] | None:
    """Return the content of a file; None if it is missing or not an object."""
    try:
        return json_object(file)
    except ExportError:
        return None


_TOKENIZERS = "*vocab*.txt merges.txt *.model *.spm *.tiktoken".split()
_OLD_WEIGHTS = ["pytorch_model*.bin", "model.bin"]  # model.bin is of CTranslate2


def pointer_in(folder: Path) -> str | None:
    """Return the refusal for a checkpoint's or adapter's first file that is a Git LFS pointer.

    Files that the export does not read are not checked: users may not have downloaded them.
    """
    patterns = ["*.json", "*.jinja", "adapter_model*"]
    if not (folder / "tokenizer.json").is_file():
        patterns += _TOKENIZERS
    files = (file for pattern in patterns for file in sorted(folder.glob(pattern)))
    if refusal := next(filter(None, map(pointer_refusal, files)), None):
        return refusal
    old = (file for pattern in _OLD_WEIGHTS for file in sorted(folder.glob(pattern)))
    return next(filter(None, map(pointer_refusal, safetensors_files(folder) or old)), None)


PROPOSED_TOKENS_FILE = "proposed_tokens.json"


def write_proposed_tokens(folder: Path, tokens: NDArray[np.int64]) -> None:
    """Write tokens, (n,) int64 ascending, into the folder of a draft."""
    text = json.dumps(tokens.tolist())
    (folder / PROPOSED_TOKENS_FILE).write_text(f"{text}\n", encoding="utf-8")


def read_proposed_tokens(folder: Path, vocab_size: int) -> NDArray[np.int64] | None:
    """Return the tokens that a draft was trained to propose, (n,) int64; None: all.

    Raises ExportError if the file is invalid.
    """
    file = folder / PROPOSED_TOKENS_FILE
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ExportError(
            f"{file} is not JSON ({error}); copy it again from the trained draft"
        ) from error
    is_list = isinstance(content, list) and all(type(each) is int for each in content)
    if not is_list or not content or content != sorted(set(content) & set(range(vocab_size))):
        raise ExportError(
            f"{file} is not an ascending list of distinct token ids from 0 to {vocab_size - 1}; "
            "copy it again from the trained draft"
        )
    return np.array(content, np.int64)


TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_DTYPE_BY_SAFETENSORS_NAME = {"F64": "fp32", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}


def convert_weights(model: PreTrainedModel, dtype: str) -> None:
    """Convert the parameters in place, one at a time; raise ExportError if one is out of range."""
    wanted = TORCH_DTYPES[dtype]
    for name, parameter in model.named_parameters():  # tied parameters are listed once
        if not parameter.is_floating_point() or parameter.dtype == wanted:
            continue
        converted = parameter.data.to(wanted)
        largest = _largest(parameter.data)
        if _largest(converted) == torch.inf > largest:
            raise ExportError(
                f"weight {name} holds {largest:.3g}, beyond the range of {dtype} (up to "
                f"{torch.finfo(wanted).max:.3g}); use bf16 or fp32"
            )
        parameter.data = converted


def _largest(weight: Tensor) -> float:
    """Return the largest absolute value, without a copy of the weight."""
    if weight.numel() == 0:
        return 0.0
    low, high = torch.aminmax(weight)
    return max(-low.item(), high.item())


def widen_constants(model: PreTrainedModel) -> None:
    """Restore buffers that no checkpoint stores, such as Gemma's embedding scale, in fp32."""
    _widen(model, model)


def _widen(module: nn.Module, owner: PreTrainedModel) -> None:
    """Widen buffers of a module and its children; ``owner``: the model that computes them."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    low = (torch.float16, torch.bfloat16)
    buffers = {name: getattr(module, name) for name in module._non_persistent_buffers_set}
    rounded = [name for name, each in buffers.items() if each is not None and each.dtype in low]
    for name in rounded:
        setattr(module, name, torch.zeros_like(buffers[name], dtype=torch.float32))
    if rounded:
        with torch.no_grad():
            owner._init_weights(module)  # keeps loaded weights
    for child in module.children():
        _widen(child, owner)


def safetensors_files(folder: Path) -> list[Path]:
    """Return the files that transformers would read, [] if it would read other formats."""
    if (folder / _SINGLE_FILE).is_file():
        return [folder / _SINGLE_FILE]
    if not (folder / _INDEX_FILE).is_file():
        return []
    file_by_weight = json_object(folder / _INDEX_FILE).get("weight_map")
    if not isinstance(file_by_weight, dict) or not all(
        isinstance(name, str) for name in file_by_weight.values()
    ):
        raise ExportError(
            f"{folder / _INDEX_FILE} has no weight_map from weights to files; copy it again"
        )
    return [folder / name for name in sorted(set(file_by_weight.values()))]


WRAPPERS = (
    r"(?:^module\.|^base_model\.model\."
    r"|\b_orig_mod\.|\b_fsdp_wrapped_module\.|\b_checkpoint_wrapped_module\.)+"
)
"""Parts of names that training adds: torch.compile, DataParallel, FSDP, checkpointing, PEFT."""


def plain_name(name: str) -> str:
    """Return the name of a weight without names of modules that wrapped its model for training."""
    return re.sub(WRAPPERS, "", name)


@contextlib.contextmanager
def open_weights(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield readers by plain names of weights; a weight is read when its reader is indexed.

    Files are not memory-mapped: mapped pages would be counted as used memory until the file is
    closed.
    """
    with contextlib.ExitStack() as stack:
        readers: dict[str, Any] = {}
        stored_by_name: dict[str, str] = {}
        for file in safetensors_files(folder):
            tensors = stack.enter_context(safe_open(file, framework="pt", backend="pread"))
            for stored in tensors.keys():
                name = plain_name(stored)
                if (other := stored_by_name.setdefault(name, stored)) != stored:
                    raise ExportError(
                        f"{file} has {stored} and {other}, which are one weight; remove one of them"
                    )
                readers[name] = tensors.get_slice(stored)
        yield readers


class ComputedWeight:
    """Weight that is computed whenever it is read; has the methods of a safetensors reader."""

    def __init__(self, shape: list[int], compute: Callable[[], Tensor]) -> None:
        self._shape = shape
        self._compute = compute

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        """Return the weight's type, as safetensors names it."""
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        return self._compute()[index]


def stored_dtype(folder: Path) -> str | None:
    """Return the precision of most of the checkpoint's numbers, None if it is unknown."""
    num_elements: Counter[str] = Counter()
    with open_weights(folder) as readers:
        for reader in readers.values():
            dtype = _DTYPE_BY_SAFETENSORS_NAME.get(reader.get_dtype())
            if dtype is not None:
                num_elements[dtype] += torch.Size(reader.get_shape()).numel()
    return num_elements.most_common(1)[0][0] if num_elements else None
