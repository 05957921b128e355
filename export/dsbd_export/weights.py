"""The precision of a model's weights, converted in place."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsbd_export.errors import ExportError

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def convert_weights(model: PreTrainedModel, dtype: str) -> None:
    """Convert the parameters in place, one at a time: each old one is freed before the next.

    Raises:
        ExportError: a weight is beyond the range of ``dtype``.
    """
    wanted = TORCH_DTYPES[dtype]
    for name, parameter in model.named_parameters():  # tied ones come once
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
    """Return the largest absolute value, without a temporary of the weight's size."""
    if weight.numel() == 0:
        return 0.0
    low, high = torch.aminmax(weight)
    return max(-low.item(), high.item())


def widen_constants(model: PreTrainedModel) -> None:
    """Give buffers that no checkpoint stores, as Gemma's embedding scale, their value in fp32.

    transformers makes them in the precision of the weights, which would round what is computed
    from the config alone.
    """
    for module in model.modules():
        if rounded := [
            name for name in module._non_persistent_buffers_set if _is_low(module, name)
        ]:
            for name in rounded:
                setattr(module, name, torch.zeros_like(getattr(module, name), dtype=torch.float32))
            with torch.no_grad():
                model._init_weights(module)  # leaves alone what was loaded


def _is_low(module: nn.Module, buffer: str) -> bool:
    value = getattr(module, buffer)
    return value is not None and value.dtype in (torch.float16, torch.bfloat16)
